-- Flows and operator control: what ffd needs beyond FlowFabric's columns.

-- No new members from here on; only a sealed flow ends by itself.
alter table ff_flow_core add column sealed_at_ms bigint;

-- Which replay of the upstream can resolve the edge: a skipped child that is replayed waits for its failed upstream to
-- end again, not for the ending that skipped it.
alter table ff_edge add column upstream_replay int not null default 0;

-- What an ending still owes its flow: `resolve` the edges out of an execution that has ended, or `cancel` one that lost
-- a race. Written in the transaction of the ending, by sweeps, which take no flow lock, and past the bound of one call.
create table ff_cascade_owed (
  partition_key  smallint not null,
  flow_id        uuid     not null,
  execution_id   uuid     not null,
  work           text     not null check (work in ('resolve', 'cancel')),
  reason         text     not null default '',
  enqueued_at_ms bigint   not null,
  primary key (partition_key, flow_id, execution_id, work)
);
create index ff_cascade_owed_enqueued on ff_cascade_owed (partition_key, enqueued_at_ms);
