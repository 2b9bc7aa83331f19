-- The foundation: every table of the engine, its functions and its indexes.
--
-- Names, types and literals are FlowFabric's, so that its workers and ffd can share a database; columns marked
-- "ffd" are additions and always have a default or are nullable. partition_key (0..255) is a logical shard and
-- leads every key that names an execution or a flow; nothing is physically partitioned, and there are no
-- foreign keys and no triggers. Event ids take a transaction id first (see ff_completion_event).

-- Functions ----------------------------------------------------------------------------------------------------

-- The one clock (I7). plpgsql because a SQL function over clock_timestamp() costs seven times as much per call,
-- STABLE because a volatile one cannot be an index condition.
create function ff_now_ms() returns bigint
language plpgsql stable parallel safe as $$
begin
  return floor(extract(epoch from clock_timestamp()) * 1000)::bigint;
end $$;

-- The rows of the state vector, and the combinations that FlowFabric writes, nothing else (I9). FlowFabric
-- leaves public_state behind in many of its paths, hence the wide lists; what it must never do again, such as
-- reviving an ended execution, is refused here. A function, because an inline CHECK of this size is parsed
-- again for every statement and costs a quarter of the throughput.
create function ff_state_ok(
  partition_key smallint, phase text, owner text, eligible text, public text, attempt text) returns boolean
language plpgsql immutable parallel safe as $$
begin
  if partition_key not between 0 and 255 then
    return false;
  end if;
  return case phase
    -- FlowFabric makes a child eligible whose dependencies are met, also while it runs or is suspended.
    when 'active' then
      owner = 'leased' and eligible in ('not_applicable', 'eligible_now') and attempt = 'running_attempt'
      and public in ('running', 'active', 'waiting', 'resumable', 'delayed', 'waiting_children')
    -- It skips a child without touching owner and eligibility.
    when 'terminal' then
      ((owner = 'unowned' and eligible = 'not_applicable')
        or (public = 'skipped' and owner in ('unowned', 'leased', 'released')
            and eligible in ('not_applicable', 'eligible_now', 'blocked_by_dependencies', 'pending_claim')))
      and attempt in ('attempt_terminal', 'cancelled', 'terminal_failed')
      and public in ('completed', 'failed', 'cancelled', 'expired', 'skipped', 'running', 'active', 'waiting',
                     'resumable', 'delayed', 'waiting_children', 'suspended')
    when 'suspended' then
      owner in ('released', 'unowned') and eligible in ('not_applicable', 'eligible_now')
      and public = 'suspended'
      and attempt = 'attempt_interrupted'
    when 'cancelled' then
      owner in ('unowned', 'leased', 'released') and eligible in ('not_applicable', 'cancelled')
      and public = 'cancelled'
      and attempt in ('cancelled', 'pending', 'pending_first_attempt', 'pending_retry_attempt',
                      'pending_replay_attempt', 'attempt_interrupted', 'running_attempt', 'attempt_terminal',
                      'terminal_failed')
    when 'runnable' then
      (owner = 'unowned' or (owner = 'released' and public = 'resumable'))
      and attempt in ('pending_first_attempt', 'pending_retry_attempt', 'pending_replay_attempt',
                      'attempt_interrupted', 'pending')
      and case eligible
        when 'eligible_now' then
          public in ('waiting', 'resumable', 'running', 'active', 'delayed', 'waiting_children')
        when 'not_eligible_until_time' then public in ('delayed', 'running', 'active', 'waiting', 'resumable')
        when 'blocked_by_dependencies' then public in ('waiting_children', 'running', 'active', 'waiting')
        when 'pending_claim' then public in ('waiting', 'resumable', 'running', 'active')
        else false
      end
    when 'submitted' then
      owner = 'unowned' and eligible in ('eligible_now', 'pending_claim') and public = 'waiting'
      and attempt in ('pending', 'pending_first_attempt')
    else false
  end;
end $$;

-- A number inside a policy document; anything absent, of another type or out of range reads as the fallback.
-- Stored documents may come from other writers: one bad document must not fail a statement over many rows.
create function ff_policy_number(policy jsonb, path text[], fallback double precision) returns double precision
language plpgsql immutable parallel safe as $$
declare
  value jsonb := policy #> path;
  number double precision;
begin
  if value is null or jsonb_typeof(value) <> 'number' then
    return fallback;
  end if;
  if value::numeric < 0 or value::numeric > 9007199254740991 then
    return fallback;
  end if;
  -- Rounded first: a numeric below the range of a double would raise.
  number := round(value::numeric, 6)::double precision;
  return number;
end $$;

-- How long to wait before the next attempt, in ms; NULL when there is none. `category` NULL asks about the
-- count alone. No policy means three retries with exponential backoff and full jitter.
create function ff_retry_delay_ms(policy jsonb, retry_count int, category text) returns bigint
language plpgsql volatile parallel safe as $$
declare
  retry jsonb := policy -> 'retry_policy';
  categories jsonb := retry -> 'retryable_categories';
  backoff jsonb := retry -> 'backoff';
  delay double precision;
begin
  if retry_count >= ff_policy_number(retry, '{max_retries}', 3) then
    return null;
  end if;
  if category is not null then
    if jsonb_typeof(categories) = 'array' and jsonb_array_length(categories) > 0 then
      if not categories ? category then
        return null;
      end if;
    elsif category not in ('transient', 'infra_crash') then
      return null;
    end if;
  end if;
  if backoff ->> 'type' = 'fixed' then
    return ff_policy_number(backoff, '{delay_ms}', 1000)::bigint;
  end if;
  -- Base and exponent are bounded so that the power can neither overflow nor underflow.
  delay := least(
    ff_policy_number(backoff, '{initial_delay_ms}', 1000)
      * power(greatest(least(ff_policy_number(backoff, '{multiplier}', 2), 1000), 0.001), least(retry_count, 60)),
    ff_policy_number(backoff, '{max_delay_ms}', 60000));
  if backoff is null or backoff -> 'jitter' = 'true'::jsonb then
    delay := delay * random();
  end if;
  return floor(delay)::bigint;
end $$;

-- Where a claim looks next: the smallest requirement set after `seen` that could be a subset of `has`. Walking the
-- lane's sets by it, a claim touches the sets it can serve and one more per gap, however many others there are.
-- NULL when no such set can exist. Comparisons follow the collation of the index, whatever it is.
create function ff_next_set(seen text[], has text[]) returns text[]
language plpgsql immutable parallel safe as $$
declare
  token text;
  smallest text;
  at int := cardinality(seen) + 1;
  i int;
begin
  if cardinality(has) = 0 then
    return null;
  end if;
  for i in 1 .. cardinality(seen) loop
    if seen[i] <> all (has) then
      at := i;
      exit;
    end if;
  end loop;
  if at > cardinality(seen) then
    -- A set that can be served: whatever continues it comes next.
    foreach token in array has loop
      if smallest is null or token < smallest then
        smallest := token;
      end if;
    end loop;
    return seen || smallest;
  end if;
  -- Nothing that starts with seen[1..at] can be served: go on with the next token at that place, or before it.
  while at > 0 loop
    smallest := null;
    foreach token in array has loop
      if token > seen[at] and (smallest is null or token < smallest) then
        smallest := token;
      end if;
    end loop;
    if smallest is not null then
      return seen[1:at - 1] || smallest;
    end if;
    at := at - 1;
  end loop;
  return null;
end $$;

-- The public state of a stored row, whoever wrote it: `ffd.core.state.read_public_state` in SQL, for filters.
create function ff_public_state(phase text, eligible text, public text, outcome text) returns text
language plpgsql immutable parallel safe as $$
begin
  return case phase
    when 'terminal' then
      case when public in ('completed', 'failed', 'expired', 'skipped', 'cancelled') then public
        else case outcome when 'success' then 'completed' when 'cancelled' then 'cancelled'
                          when 'expired' then 'expired' when 'interrupted' then 'expired'
                          when 'skipped' then 'skipped' else 'failed' end
      end
    when 'cancelled' then 'cancelled'
    when 'suspended' then 'suspended'
    when 'active' then 'running'
    else case eligible when 'not_eligible_until_time' then 'delayed'
                       when 'blocked_by_dependencies' then 'waiting_children'
                       else case public when 'resumable' then 'resumable' else 'waiting' end end
  end;
end $$;

-- Executions ---------------------------------------------------------------------------------------------------

create table ff_exec_core (
  partition_key         smallint not null,
  execution_id          uuid     not null,
  flow_id               uuid,
  lane_id               text     not null,
  required_capabilities text[]   not null default '{}',
  attempt_index         int      not null default 0,
  lifecycle_phase       text     not null,
  ownership_state       text     not null,
  eligibility_state     text     not null,
  public_state          text     not null,
  attempt_state         text     not null,
  blocking_reason       text,
  cancellation_reason   text,
  cancelled_by          text,
  priority              int      not null default 0,
  created_at_ms         bigint   not null,
  terminal_at_ms        bigint,
  deadline_at_ms        bigint,
  payload               bytea,
  result                bytea,
  policy                jsonb,
  raw_fields            jsonb    not null default '{}',
  started_at_ms         bigint,
  lease_reclaim_count   int      not null default 0,
  -- ffd: the life-long epoch counter; ff_attempt.lease_epoch is the fence, this only makes it grow (I1).
  lease_epoch           bigint   not null default 0,
  -- ffd: when a delayed execution is due; NULL with not_eligible_until_time means deadline_at_ms (FlowFabric).
  delay_until_ms        bigint,
  -- ffd: why the current attempt was interrupted; decides between resuming and reclaiming it.
  interruption          text,
  retry_count           int      not null default 0,
  replay_count          int      not null default 0,
  failure_message       text,
  -- ffd: when the present state began, for explanations.
  state_since_ms        bigint,
  primary key (partition_key, execution_id),
  constraint ff_exec_core_state check (
    ff_state_ok(partition_key, lifecycle_phase, ownership_state, eligibility_state, public_state, attempt_state))
) with (
  autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 500, vacuum_index_cleanup = on);

-- Claims walk this index: a loose scan over the lane's requirement sets, then the best of each matching set.
-- Queries repeat the predicate word for word.
create index ff_exec_core_claim on ff_exec_core
  (lane_id, required_capabilities, priority desc, created_at_ms, execution_id)
  where lifecycle_phase in ('runnable', 'submitted') and eligibility_state = 'eligible_now';
create index ff_exec_core_flow on ff_exec_core (partition_key, flow_id, execution_id) where flow_id is not null;
-- A delayed row without any time is due at once: nobody else would ever find it.
create index ff_exec_core_delay on ff_exec_core (partition_key, (coalesce(delay_until_ms, deadline_at_ms, 0)))
  where eligibility_state = 'not_eligible_until_time';
create index ff_exec_core_deadline on ff_exec_core (partition_key, deadline_at_ms)
  where deadline_at_ms is not null and terminal_at_ms is null;
create index ff_exec_core_terminal on ff_exec_core (partition_key, terminal_at_ms) where terminal_at_ms is not null;
create index ff_exec_core_list on ff_exec_core (public_state, execution_id, partition_key);

create table ff_attempt (
  partition_key       smallint not null,
  execution_id        uuid     not null,
  attempt_index       int      not null,
  worker_id           text,
  worker_instance_id  text,
  lease_epoch         bigint   not null default 0,
  lease_expires_at_ms bigint,
  started_at_ms       bigint,
  terminal_at_ms      bigint,
  outcome             text,
  usage               jsonb,
  policy              jsonb,
  raw_fields          jsonb    not null default '{}',
  -- ffd: when the attempt times out, counted from the latest claim; NULL without a lease or a timeout.
  timeout_at_ms       bigint,
  -- ffd: what a failed attempt was answered, for its repeat (I2).
  retry_at_ms         bigint,
  failure_category    text,
  failure_message     text,
  progress_percent    smallint,
  progress_message    text,
  primary key (partition_key, execution_id, attempt_index)
) with (
  fillfactor = 85,
  autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 500, vacuum_index_cleanup = on);

create index ff_attempt_lease on ff_attempt (partition_key, lease_expires_at_ms)
  where lease_expires_at_ms is not null;
create index ff_attempt_timeout on ff_attempt (partition_key, timeout_at_ms) where timeout_at_ms is not null;

-- ffd: which execution an idempotency key stands for, and until when.
create table ff_exec_dedup (
  partition_key   smallint not null,
  namespace       text     not null,
  idempotency_key text     not null,
  exec_partition  smallint not null,
  execution_id    uuid     not null,
  expires_at_ms   bigint   not null,
  primary key (partition_key, namespace, idempotency_key)
);
create index ff_exec_dedup_expires on ff_exec_dedup (partition_key, expires_at_ms);

create table ff_lane_registry (
  lane_id          text   primary key,
  registered_at_ms bigint not null,
  registered_by    text   not null
);

create table ff_claim_grant (
  partition_key       smallint not null,
  grant_id            bytea    not null,
  execution_id        uuid     not null,
  kind                text     not null check (kind in ('claim', 'reclaim')),
  worker_id           text     not null,
  worker_instance_id  text     not null,
  lane_id             text,
  capability_hash     text,
  worker_capabilities jsonb    not null default '[]',
  route_snapshot_json text,
  admission_summary   text,
  grant_ttl_ms        bigint   not null,
  issued_at_ms        bigint   not null,
  expires_at_ms       bigint   not null,
  primary key (partition_key, grant_id)
);
create index ff_claim_grant_execution on ff_claim_grant (partition_key, execution_id);
create index ff_claim_grant_expires on ff_claim_grant (expires_at_ms);

-- Flows --------------------------------------------------------------------------------------------------------

create table ff_flow_core (
  partition_key     smallint not null,
  flow_id           uuid     not null,
  graph_revision    bigint   not null default 0,
  public_flow_state text     not null,
  created_at_ms     bigint   not null,
  terminal_at_ms    bigint,
  raw_fields        jsonb    not null default '{}',
  primary key (partition_key, flow_id)
);

create table ff_edge (
  partition_key  smallint not null,
  flow_id        uuid     not null,
  edge_id        uuid     not null,
  upstream_eid   uuid     not null,
  downstream_eid uuid     not null,
  policy         jsonb    not null,
  policy_version int      not null default 0,
  -- ffd: how the edge was resolved; NULL while it is open. Per edge, so that nothing is counted twice.
  resolution     text     check (resolution in ('satisfied', 'impossible')),
  primary key (partition_key, flow_id, edge_id)
);
create index ff_edge_downstream on ff_edge (partition_key, flow_id, downstream_eid)
  include (upstream_eid, policy_version);
create index ff_edge_upstream on ff_edge (partition_key, flow_id, upstream_eid);

create table ff_edge_group (
  partition_key                   smallint not null,
  flow_id                         uuid     not null,
  downstream_eid                  uuid     not null,
  policy                          jsonb    not null,
  k_target                        int      not null default 0,
  success_count                   int      not null default 0,
  fail_count                      int      not null default 0,
  skip_count                      int      not null default 0,
  running_count                   int      not null default 0,
  cancel_siblings_pending_flag    boolean  not null default false,
  cancel_siblings_pending_members text[]   not null default '{}',
  primary key (partition_key, flow_id, downstream_eid)
);

create table ff_pending_cancel_groups (
  partition_key  smallint not null,
  flow_id        uuid     not null,
  downstream_eid uuid     not null,
  enqueued_at_ms bigint   not null,
  primary key (partition_key, flow_id, downstream_eid)
);
create index ff_pending_cancel_groups_enqueued on ff_pending_cancel_groups (partition_key, enqueued_at_ms);

create table ff_cancel_backlog (
  partition_key       smallint not null,
  flow_id             uuid     not null,
  requested_at_ms     bigint   not null,
  requester           text     not null default '',
  reason              text     not null default '',
  grace_until_ms      bigint,
  cancellation_policy text     not null,
  status              text     not null default 'pending',
  primary key (partition_key, flow_id)
);

create table ff_cancel_backlog_member (
  partition_key smallint not null,
  flow_id       uuid     not null,
  execution_id  text     not null,
  primary key (partition_key, flow_id, execution_id)
);

-- Suspension ---------------------------------------------------------------------------------------------------

create table ff_suspension_current (
  partition_key    smallint not null,
  execution_id     uuid     not null,
  suspension_id    uuid     not null,
  suspended_at_ms  bigint   not null,
  timeout_at_ms    bigint,
  reason_code      text,
  condition        jsonb    not null,
  satisfied_set    jsonb    not null default '[]',
  member_map       jsonb    not null default '{}',
  timeout_behavior text,
  primary key (partition_key, execution_id)
) with (fillfactor = 70);
create index ff_suspension_current_suspended on ff_suspension_current (partition_key, suspended_at_ms);
create index ff_suspension_current_timeout on ff_suspension_current (partition_key, timeout_at_ms)
  where timeout_at_ms is not null;

create table ff_waitpoint_pending (
  partition_key         smallint not null,
  waitpoint_id          uuid     not null,
  execution_id          uuid     not null,
  token_kid             text     not null,
  token                 text     not null,
  created_at_ms         bigint   not null,
  expires_at_ms         bigint,
  condition             jsonb,
  waitpoint_key         text     not null default '',
  state                 text     not null default 'pending',
  required_signal_names text[]   not null default '{}',
  activated_at_ms       bigint,
  primary key (partition_key, waitpoint_id)
);
create index ff_waitpoint_pending_expires on ff_waitpoint_pending (partition_key, expires_at_ms)
  where expires_at_ms is not null;
create index ff_waitpoint_pending_execution on ff_waitpoint_pending (partition_key, execution_id);

create table ff_waitpoint_hmac (
  kid           text    primary key,
  secret        bytea   not null,
  rotated_at_ms bigint  not null,
  active        boolean not null default true
);

create table ff_suspend_dedup (
  partition_key   smallint not null,
  idempotency_key text     not null,
  outcome_json    jsonb    not null,
  created_at_ms   bigint   not null,
  primary key (partition_key, idempotency_key)
);

-- Events -------------------------------------------------------------------------------------------------------
--
-- An event id must be drawn after its transaction has an xid, or a reader cannot tell when a gap can no longer
-- be filled. CASE is evaluated left to right and cannot be inlined away, so it takes the xid first. One cache
-- slot and no cycle, for the same proof. Readers walk by event_id alone, so it leads the one index there is;
-- partition_key stands behind it for databases that need the shard in every unique key.

create sequence ff_completion_event_id_seq as bigint cache 1 no cycle;
create table ff_completion_event (
  partition_key    smallint not null,
  event_id         bigint   not null default (
    case when pg_current_xact_id() is not null then nextval('ff_completion_event_id_seq') end),
  execution_id     uuid     not null,
  flow_id          uuid,
  outcome          text     not null,
  namespace        text,
  instance_tag     text,
  occurred_at_ms   bigint   not null,
  committed_at_ms  bigint   not null default ff_now_ms(),
  dispatched_at_ms bigint,
  tags             jsonb,
  primary key (event_id, partition_key)
) with (autovacuum_vacuum_insert_scale_factor = 0.05);

create sequence ff_lease_event_id_seq as bigint cache 1 no cycle;
create table ff_lease_event (
  event_id           bigint not null default (
    case when pg_current_xact_id() is not null then nextval('ff_lease_event_id_seq') end),
  execution_id       text   not null,
  lease_id           text,
  event_type         text   not null,
  occurred_at_ms     bigint not null,
  partition_key      int    not null,
  namespace          text,
  instance_tag       text,
  tags               jsonb,
  cause              text,
  attempt_index      int,
  lease_epoch        bigint,
  worker_id          text,
  worker_instance_id text,
  primary key (event_id, partition_key)
) with (autovacuum_vacuum_insert_scale_factor = 0.05);

create sequence ff_signal_event_id_seq as bigint cache 1 no cycle;
create table ff_signal_event (
  event_id        bigint not null default (
    case when pg_current_xact_id() is not null then nextval('ff_signal_event_id_seq') end),
  execution_id    text   not null,
  signal_id       text   not null,
  waitpoint_id    text,
  source_identity text,
  delivered_at_ms bigint not null,
  partition_key   int    not null,
  namespace       text,
  instance_tag    text,
  tags            jsonb,
  signal_name     text,
  effect          text,
  primary key (event_id, partition_key)
) with (autovacuum_vacuum_insert_scale_factor = 0.05);

create sequence ff_operator_event_id_seq as bigint cache 1 no cycle;
create table ff_operator_event (
  event_id       bigint not null default (
    case when pg_current_xact_id() is not null then nextval('ff_operator_event_id_seq') end),
  execution_id   text   not null,
  event_type     text   not null check (event_type in (
    'priority_changed', 'replayed', 'flow_cancel_requested',
    'cancelled', 'lease_revoked', 'resumed', 'escalated', 'flow_ended')),
  details        jsonb  not null default '{}',
  occurred_at_ms bigint not null,
  partition_key  int    not null,
  namespace      text,
  instance_tag   text,
  tags           jsonb,
  actor          text,
  reason         text,
  primary key (event_id, partition_key)
) with (autovacuum_vacuum_insert_scale_factor = 0.05);

-- A sequence dies with the column it feeds.
alter sequence ff_completion_event_id_seq owned by ff_completion_event.event_id;
alter sequence ff_lease_event_id_seq owned by ff_lease_event.event_id;
alter sequence ff_signal_event_id_seq owned by ff_signal_event.event_id;
alter sequence ff_operator_event_id_seq owned by ff_operator_event.event_id;
