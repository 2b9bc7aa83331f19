-- ffd: no-transaction
-- squawk-ignore-file ban-concurrent-index-creation-in-transaction
-- What retention walks, oldest first. Each is dropped first: a build that was interrupted leaves an invalid index behind.

-- Ended executions outside of flows, without and with a retention of their own; members go with their flow.
drop index concurrently if exists ff_exec_core_keep;
create index concurrently ff_exec_core_keep on ff_exec_core (partition_key, terminal_at_ms)
  where terminal_at_ms is not null and flow_id is null and ff_policy_number(policy, '{retention_ms}', -1) < 0;
drop index concurrently if exists ff_exec_core_keep_own;
create index concurrently ff_exec_core_keep_own on ff_exec_core
  (partition_key, (terminal_at_ms + ff_policy_number(policy, '{retention_ms}', 0)::bigint))
  where terminal_at_ms is not null and flow_id is null and ff_policy_number(policy, '{retention_ms}', -1) >= 0;
drop index concurrently if exists ff_exec_core_terminal;

drop index concurrently if exists ff_flow_core_keep;
create index concurrently ff_flow_core_keep on ff_flow_core (partition_key, terminal_at_ms)
  where terminal_at_ms is not null;
