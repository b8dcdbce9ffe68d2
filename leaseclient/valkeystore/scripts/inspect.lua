#!lua flags=allow-oom
-- Reads the current record of an identity, or the record of a lease id whatever
-- became of it. It may record that a lease has run out, and write to the list of
-- corrupt locks, and to nothing else.
-- ARGV by identity: 6 canonical identity, 7-13 its components
-- ARGV by lease id: 4 and 5 are empty, 6 is the lease id
local no = closed()
if no then return no end

local id = nil
if DIGEST == '' then
  id = ARGV[6]
  local key = PREFIX .. 'lid:' .. id
  if not is(key, 'hash') then return { 'unavailable', text(NOW), 'the evidence of the lease is damaged' } end
  if redis.call('EXISTS', key) == 0 then return late() or { 'lease_not_found', text(NOW) } end
  LOCK_KEY = redis.call('HGET', key, 'lock_key') or ''
  DIGEST = string.match(LOCK_KEY, '([^:]+)$') or ''
  if LOCK_KEY ~= LOCK_PREFIX .. DIGEST then return { 'unavailable', text(NOW), 'the evidence of the lease is damaged' } end
end

local _, lease, damage
if id then
  _, lease, damage = current()
else
  _, lease, damage = presented()
end
if damage then return corrupt(damage) end
no = late()
if no then return no end

if lease and (not id or lease.lease_id == id) then return reply_lease({ 'lease_inspected', text(NOW) }, lease.raw) end
if id then
  local raw
  raw, damage = evidence_of(id)
  if damage then return corrupt(damage) end
  raw[26] = state_of(id, raw[26], lease)
  return reply_lease({ 'lease_inspected', text(NOW) }, raw)
end
-- The last lease of the identity is told when it ran out: its holder did not say
-- that it was done with it.
if not is(lock('hist'), 'list') then return corrupt('history: wrong type') end
local last = redis.call('LINDEX', lock('hist'), 0)
if last then
  local ok, entry = pcall(cjson.decode, last)
  if not ok or type(entry) ~= 'table' then return corrupt('history: an entry is malformed') end
  if entry.state == 'expired' then
    local raw = {}
    for i, name in ipairs(FIELDS) do
      if type(entry[name]) ~= 'string' then return corrupt('history: ' .. name .. ' is missing') end
      raw[i] = entry[name]
    end
    return reply_lease({ 'lease_inspected', text(NOW) }, raw)
  end
end
return { 'lease_not_found', text(NOW) }
