#!lua flags=allow-oom
-- Extends the lease of exactly this owner, instance and token.
-- ARGV: 6 canonical identity, 7-13 its components, 14 request digest,
--   15 name of the request, 16 lease id, 17 principal, 18 instance, 19 token,
--   20 retention ms, or 0 to remember nothing, 21 reclamation delay ms
local no = closed()
if no then return no end

-- The results of renewals live with the lease's id, one field a request: a
-- lease has many renewals and they all may be forgotten together.
local results = PREFIX .. 'rnw:' .. ARGV[16]
if not is(results, 'hash') then return corrupt('idempotency: wrong type') end
local _, lease, damage = presented()
if damage then return corrupt(damage) end

local first = redis.call('HGET', results, ARGV[15])
if first then
  local digest, renewed, expires = string.match(first, '^(%S+) (%d+) (%d+)$')
  if not digest or not number(renewed) or not number(expires) then
    return corrupt('idempotency: a renewal is malformed')
  end
  if digest ~= ARGV[14] then return { 'idempotency_conflict', text(NOW) } end
  local raw
  raw, damage = evidence_of(ARGV[16])
  if damage then return corrupt(damage) end
  raw[17], raw[18], raw[26] = renewed, expires, state_of(ARGV[16], raw[26], lease)
  return reply_lease({ 'lease_renewed', text(NOW), 'replayed' }, raw)
end

no = late()
if no then return no end
if not same(lease, ARGV[16], ARGV[17], ARGV[18], ARGV[19]) then return { 'lease_lost', text(NOW) } end

local last = lease.acquired_at + lease.maximum_lifetime_ms
local expires = math.min(NOW + lease.ttl_ms, last)
-- A clock that went back must not shorten what was granted.
if expires < lease.expires_at then expires = lease.expires_at end
local renewed = math.max(NOW, lease.renewed_at)
redis.call('HSET', lock('lease'), 'renewed_at', text(renewed), 'expires_at', text(expires))
redis.call('PEXPIREAT', lock('lease'), text(expires + tonumber(ARGV[21])))
if ARGV[20] ~= '0' then
  redis.call('HSET', results, ARGV[15], ARGV[14] .. ' ' .. text(renewed) .. ' ' .. text(expires))
  keep(results, ARGV[20])
  keep(PREFIX .. 'lid:' .. ARGV[16], ARGV[20])
end
lease.raw[17], lease.raw[18] = text(renewed), text(expires)
return reply_lease({ 'lease_renewed', text(NOW), 'first' }, lease.raw)
