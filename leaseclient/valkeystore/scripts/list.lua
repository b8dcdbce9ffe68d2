#!lua flags=allow-oom
-- Lists active leases of this shard by an index, from a place on. The order is
-- that of the digests, which never changes. A row is judged by its record: one
-- that is over, damaged or another's is not told.
-- ARGV: 4 how many rows may be read, 5 the last digest of the page before or
--   empty, 6 index, 7 tenant, 8 program, 9 principal or target namespace, 10
--   target
local no = closed()
if no then return no end
no = late()
if no then return no end

local by, parts = ARGV[6], { ARGV[7], ARGV[8] }
if by == 'owner' then parts = { ARGV[7], ARGV[8], ARGV[9] } end
if by == 'target' then parts = { ARGV[7], ARGV[8], ARGV[9], ARGV[10] } end
local key = index_of(by, parts)
if not is(key, 'zset') then return { 'unavailable', text(NOW), 'an index is damaged' } end

local count, from = tonumber(ARGV[4]), '-'
if ARGV[5] ~= '' then from = '(' .. ARGV[5] end
local page = redis.call('ZRANGEBYLEX', key, from, '+', 'LIMIT', 0, count)
local out = { 'listed', text(NOW), page[#page] or '', text(#page) }
for _, digest in ipairs(page) do
  DIGEST = digest
  LOCK_KEY = LOCK_PREFIX .. digest
  local _, lease, damage = current()
  if damage then
    corrupt(damage)
  elseif not lease then
    -- The record has left the store; nobody came by to record its end.
    redis.call('ZREM', key, digest)
  else
    local mine = false
    for _, name in ipairs(indexes(lease.raw)) do mine = mine or name == key end
    if mine then reply_lease(out, lease.raw) end
  end
end
return out
