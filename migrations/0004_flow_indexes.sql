-- ffd: no-transaction
-- squawk-ignore-file ban-concurrent-index-creation-in-transaction
-- Indexes for flows and for what an execution leaves behind, built while others work. Each is dropped first: a build
-- that was interrupted leaves an invalid index behind.

-- The members that have not ended: whether a flow is over is one probe, however large it is.
drop index concurrently if exists ff_exec_core_flow_open;
create index concurrently ff_exec_core_flow_open on ff_exec_core (partition_key, flow_id, execution_id)
  where flow_id is not null and lifecycle_phase not in ('terminal', 'cancelled');

-- The edges into a child that are still open: a group decides without counting the resolved ones.
drop index concurrently if exists ff_edge_open;
create index concurrently ff_edge_open on ff_edge (partition_key, flow_id, downstream_eid)
  where resolution is null;

-- Flows, newest first, over all partitions.
drop index concurrently if exists ff_flow_core_list;
create index concurrently ff_flow_core_list on ff_flow_core (flow_id, partition_key);

-- What a replay and retention take away with an execution.
drop index concurrently if exists ff_suspend_dedup_execution;
create index concurrently ff_suspend_dedup_execution on ff_suspend_dedup (partition_key, execution_id);
