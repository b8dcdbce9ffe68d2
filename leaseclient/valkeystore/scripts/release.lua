#!lua flags=allow-oom
-- Gives back the lease of exactly this owner, instance and token.
-- ARGV: 6 canonical identity, 7-13 its components, 14 request digest,
--   15 idempotency key, 16 lease id, 17 principal, 18 instance, 19 token,
--   20 retention ms
local no = closed()
if no then return no end

local idem = PREFIX .. 'idem:' .. ARGV[15]
if not is(idem, 'hash') then return corrupt('idempotency: wrong type') end
local _, lease, damage = presented()
if damage then return corrupt(damage) end

local first, known = hash(idem)
if known > 0 then
  if first.op ~= 'release' or not first.digest or not first.lease_id then
    return corrupt('idempotency: a field is missing or malformed')
  end
  if first.digest ~= ARGV[14] then return { 'idempotency_conflict', text(NOW) } end
  local raw
  raw, damage = evidence_of(first.lease_id)
  if damage then return corrupt(damage) end
  return reply_lease({ 'lease_released', text(NOW), 'replayed' }, raw)
end

no = late()
if no then return no end
if not same(lease, ARGV[16], ARGV[17], ARGV[18], ARGV[19]) then return { 'lease_lost', text(NOW) } end
if not retirable(lease) then return corrupt('history: wrong type') end

retire(lease, 'released', NOW, ARGV[20], { ended_by = ARGV[17] })
-- What the holder left behind may be swept as soon as it is old enough, not only
-- when the lease would have run out.
local head = log_ok() and oldest()
if head then redis.call('ZADD', PREFIX .. 'unsettled', text(head.not_after), DIGEST) end
redis.call('HSET', idem, 'op', 'release', 'digest', ARGV[14], 'lease_id', ARGV[16])
keep(idem, ARGV[20])
notify('released', lease)
lease.raw[26] = 'released'
return reply_lease({ 'lease_released', text(NOW), 'first' }, lease.raw)
