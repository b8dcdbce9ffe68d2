#!lua
-- Grants the lease if no unexpired one exists.
-- ARGV: 6 canonical identity, 7-13 its components, 14 request digest,
--   15 idempotency key, 16 lease id, 17 principal, 18 client, 19 credential,
--   20 instance, 21 ttl, 22 maximum lifetime, 23 execution, 24 job, 25 trace,
--   26 request id, 27 metadata, 28 retention ms, 29 reclamation delay ms
local no, epoch = closed()
if no then return no end

local idem = PREFIX .. 'idem:' .. ARGV[15]
if not is(idem, 'hash') then return corrupt('idempotency: wrong type') end
local fence, lease, damage = presented()
if damage then return corrupt(damage) end

-- A repetition is answered before anything else is judged, its deadline
-- included: the mutation has happened.
local first, known = hash(idem)
if known > 0 then
  if first.op ~= 'acquire' or not first.digest or not first.lease_id or not number(first.acquired_at)
    or not number(first.expires_at) then
    return corrupt('idempotency: a field is missing or malformed')
  end
  if first.digest ~= ARGV[14] then return { 'idempotency_conflict', text(NOW) } end
  local raw
  raw, damage = evidence_of(first.lease_id)
  if damage then return corrupt(damage) end
  -- The answer to the first one may have been lost before it was on disk. The
  -- server waits for what this connection wrote; so the same is written again.
  redis.call('HSET', idem, 'op', 'acquire')
  local state = state_of(first.lease_id, raw[26], lease)
  raw[17], raw[18], raw[26] = first.acquired_at, first.expires_at, 'active'
  return reply_lease({ 'lease_acquired', text(NOW), 'replayed', state }, raw)
end

no = late()
if no then return no end

if lease then
  return { 'lease_conflict', text(NOW) }
end
if not log_ok() then return corrupt('log: wrong type') end
if not fence and (redis.call('EXISTS', lock('logq'), lock('logm'), lock('hist')) > 0) then
  return corrupt('fence: the counter is gone, its log or history is not')
end
local mine = PREFIX .. 'lid:' .. ARGV[16]
if redis.call('EXISTS', mine) ~= 0 then return corrupt('evidence: the lease id exists') end

local base = epoch * 1099511627776
local token = math.max(fence and fence.token or 0, base) + 1
if token > MAX_NUMBER then return { 'exhausted', text(NOW) } end

local ttl, life = tonumber(ARGV[21]), tonumber(ARGV[22])
local expires = NOW + math.min(ttl, life)
local raw = {
  '1', LOCK_KEY, ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13],
  ARGV[16], ARGV[17], ARGV[18], ARGV[19], ARGV[20], text(token), text(NOW), text(NOW), text(expires),
  ARGV[21], ARGV[22], ARGV[23], ARGV[24], ARGV[25], ARGV[26], ARGV[27], 'active',
}
if not indexes_ok(raw) then return corrupt('index: wrong type') end
local flat = {}
for i, name in ipairs(FIELDS) do
  flat[#flat + 1] = name
  flat[#flat + 1] = raw[i]
end

if fence then
  redis.call('HSET', lock('fence'), 'token', text(token))
else
  redis.call('HSET', lock('fence'), 'v', '1', 'lock_key', LOCK_KEY, 'identity', ARGV[6], 'token', text(token),
    'hwm', '0', 'hwm_lease', '', 'seq', '0', 'log_bytes', '0', 'created_at', text(NOW))
end
redis.call('HSET', lock('lease'), unpack(flat))
redis.call('PEXPIREAT', lock('lease'), text(expires + tonumber(ARGV[29])))
for _, name in ipairs(indexes(raw)) do redis.call('ZADD', name, '0', DIGEST) end
redis.call('HSET', mine, unpack(flat))
keep(mine, ARGV[28])
redis.call('HSET', idem, 'op', 'acquire', 'digest', ARGV[14], 'lease_id', ARGV[16], 'acquired_at', text(NOW),
  'expires_at', text(expires))
keep(idem, ARGV[28])
return reply_lease({ 'lease_acquired', text(NOW), 'first', 'active' }, raw)
