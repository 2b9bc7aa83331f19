-- The daemon: who sweeps what, rows that cannot be moved, and how far events were trimmed.

-- Running daemons. A node is alive while its row has not run out on the database clock.
create table ff_node (
  node_id          text   primary key,
  name             text   not null,
  version          text   not null,
  started_at_ms    bigint not null,
  heartbeat_at_ms  bigint not null,
  expires_at_ms    bigint not null
);

-- Who sweeps a partition: valid while that node is alive, written only when the partition moves. The epoch counts the
-- moves. A node that made no progress with it is avoided for a while.
create table ff_partition (
  partition_key  smallint primary key check (partition_key between 0 and 255),
  node_id        text,
  epoch          bigint   not null default 0,
  moved_at_ms    bigint   not null default 0,
  avoid_node_id  text,
  avoid_until_ms bigint   not null default 0
);
insert into ff_partition (partition_key) select at::smallint from generate_series(0, 255) at;

-- Rows that a reconciler could not move: left alone until their time comes again, so that they stop nobody else.
-- entity_id is an execution, a waitpoint or a flow, as the reconciler counts.
create table ff_quarantine (
  partition_key smallint not null,
  reconciler    text     not null,
  entity_id     uuid     not null,
  failures      int      not null default 1,
  error         text     not null,
  first_at_ms   bigint   not null,
  retry_at_ms   bigint   not null,
  primary key (partition_key, reconciler, entity_id)
);

-- Per stream: every id up to trimmed_through may be gone, and renewals up to renewals_through are.
create table ff_event_trim (
  stream           text   primary key,
  trimmed_through  bigint not null default 0,
  renewals_through bigint not null default 0
);
insert into ff_event_trim (stream) values ('completion'), ('lease'), ('signal'), ('operator');
