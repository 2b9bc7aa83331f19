-- ffd: no-transaction
-- squawk-ignore-file ban-concurrent-index-creation-in-transaction
-- Indexes for flows and for what an execution leaves behind, built while others work. Each is dropped first: a build
-- that was interrupted leaves an invalid index behind.

-- The members that have not ended: whether a flow is over is one probe, however large it is.
drop index concurrently if exists ff_exec_core_flow_open;
create index concurrently ff_exec_core_flow_open on ff_exec_core (partition_key, flow_id, execution_id)
  where flow_id is not null and lifecycle_phase not in ('terminal', 'cancelled');

-- Edges out of an execution, and the open ones into one: a group decides without counting the resolved ones. Keyed by
-- the execution alone: behind (partition_key, flow_id), which the planner takes for unique, every index of this table
-- looks equally good to it, and the wrong one reads the whole flow. So nothing else may start with those two but the key.
drop index concurrently if exists ff_edge_out;
create index concurrently ff_edge_out on ff_edge (upstream_eid, edge_id);
drop index concurrently if exists ff_edge_in;
create index concurrently ff_edge_in on ff_edge (downstream_eid, edge_id);
drop index concurrently if exists ff_edge_open;
create index concurrently ff_edge_open on ff_edge (downstream_eid) where resolution is null;
drop index concurrently if exists ff_edge_upstream;
drop index concurrently if exists ff_edge_downstream;

-- Work that a FlowFabric scheduler has granted to a worker.
drop index concurrently if exists ff_exec_core_granted;
create index concurrently ff_exec_core_granted on ff_exec_core (partition_key, execution_id)
  where eligibility_state = 'pending_claim';

-- Flows, newest first, over all partitions.
drop index concurrently if exists ff_flow_core_list;
create index concurrently ff_flow_core_list on ff_flow_core (flow_id, partition_key);

-- What a replay and retention take away with an execution.
drop index concurrently if exists ff_suspend_dedup_execution;
create index concurrently ff_suspend_dedup_execution on ff_suspend_dedup (partition_key, execution_id);
