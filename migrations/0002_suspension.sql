-- Suspension, signals and signing keys: what ffd needs beyond FlowFabric's columns.

-- Until when a retired key still verifies; NULL on a retired key (FlowFabric rotated it) means without end.
alter table ff_waitpoint_hmac add column verifies_until_ms bigint;
-- At most one key signs. Not concurrently: the table holds a handful of rows.
-- squawk-ignore require-concurrent-index-creation
create unique index ff_waitpoint_hmac_one_active on ff_waitpoint_hmac (active) where active;

-- Signals that arrived before the suspension they are for.
alter table ff_waitpoint_pending add column buffered jsonb not null default '[]';

-- How long a met condition still waits, and when and why the suspension ended. The row stays for observe_signals.
alter table ff_suspension_current add column resume_delay_ms bigint not null default 0;
alter table ff_suspension_current add column closed_at_ms bigint;
alter table ff_suspension_current add column close_reason text;

-- Signals accepted over the execution's life: the limit, and the order among signals of one millisecond.
alter table ff_exec_core add column signal_count int not null default 0;

-- ffd stores the key as <execution uuid>:<key>, so that it can never find another execution's outcome.
alter table ff_suspend_dedup add column execution_id uuid;

create table ff_signal_dedup (
  partition_key   smallint not null,
  waitpoint_id    uuid     not null,
  idempotency_key text     not null,
  execution_id    uuid     not null,
  signal_id       text     not null,
  expires_at_ms   bigint   not null,
  primary key (partition_key, waitpoint_id, idempotency_key)
);
create index ff_signal_dedup_execution on ff_signal_dedup (partition_key, execution_id);
create index ff_signal_dedup_expires on ff_signal_dedup (partition_key, expires_at_ms);
