#!lua flags=allow-oom
-- Takes a lease away from its holder: exactly the one that was observed, and
-- never a successor. The audit event is written in the same step.
-- ARGV: 6 canonical identity, 7-13 its components, 14 request digest,
--   15 idempotency key, 16 lease id, 17 token, 18 retention ms,
--   19 operation: force_release or revoke, 20 state: released or revoked,
--   21 principal, 22 client, 23 credential, 24 instance of the administrator,
--   25 reason, 26 incident, 27 request id, 28 correlation id, 29 decision id,
--   30 how many audit events are kept
local no = closed()
if no then return no end

local idem = PREFIX .. 'idem:' .. ARGV[15]
if not is(idem, 'hash') then return corrupt('idempotency: wrong type') end
local _, lease, damage = presented()
if damage then return corrupt(damage) end

local op, state = ARGV[19], ARGV[20]
local first, known = hash(idem)
if known > 0 then
  if first.op ~= op or not first.digest or not first.lease_id or not number(first.in_flight) then
    return corrupt('idempotency: a field is missing or malformed')
  end
  if first.digest ~= ARGV[14] then return { 'idempotency_conflict', text(NOW) } end
  local raw
  raw, damage = evidence_of(first.lease_id)
  if damage then return corrupt(damage) end
  -- Written again, so that waiting for the disk proves the first one.
  redis.call('HSET', idem, 'op', op)
  return reply_lease({ 'lease_invalidated', text(NOW), 'replayed', first.in_flight }, raw)
end

no = late()
if no then return no end
if not lease or lease.lease_id ~= ARGV[16] or text(lease.fencing_token) ~= ARGV[17] then
  return { 'lease_lost', text(NOW) }
end
if not retirable(lease) then return corrupt('history: wrong type') end
if not log_ok() then return corrupt('log: wrong type') end
local head
head, damage = oldest()
if damage then return corrupt(damage) end
local audit = PREFIX .. 'audit'
if not is(audit, 'stream') then return { 'unavailable', text(NOW), 'the audit stream is damaged' } end

local in_flight = text(redis.call('ZCARD', lock('logq')))
retire(lease, state, NOW, ARGV[18], { ended_by = ARGV[21], reason = ARGV[25], incident_id = ARGV[26] })
-- What the holder left behind may be swept as soon as it is old enough.
if head then redis.call('ZADD', PREFIX .. 'unsettled', text(head.not_after), DIGEST) end
redis.call('HSET', idem, 'op', op, 'digest', ARGV[14], 'lease_id', ARGV[16], 'in_flight', in_flight)
keep(idem, ARGV[18])
redis.call('XADD', audit, 'MAXLEN', '~', ARGV[30], '*', 'v', '1', 'event_type', 'target_lease_' .. op, 'at', text(NOW),
  'code', state == 'revoked' and 'lease_revoked' or 'lease_released',
  'request_id', ARGV[27], 'correlation_id', ARGV[28], 'decision_id', ARGV[29],
  'trace_id', lease.trace_id, 'execution_id', lease.execution_id, 'job_id', lease.job_id,
  'principal_id', ARGV[21], 'client_id', ARGV[22], 'credential_id', ARGV[23], 'service_instance_id', ARGV[24],
  'tenant_id', ARGV[7], 'program_id', ARGV[8], 'target_namespace', ARGV[9], 'target_id', ARGV[10],
  'actor_name', ARGV[11], 'workflow_name', ARGV[12], 'operation_class', ARGV[13],
  'lease_id', lease.lease_id, 'fencing_token', text(lease.fencing_token),
  'previous_state', 'active', 'resulting_state', state, 'reason', ARGV[25], 'incident_id', ARGV[26],
  'in_flight', in_flight)
notify(op, lease)
lease.raw[26] = state
return reply_lease({ 'lease_invalidated', text(NOW), 'first', in_flight }, lease.raw)
