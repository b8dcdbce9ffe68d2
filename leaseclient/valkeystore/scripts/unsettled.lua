#!lua flags=no-writes
-- Lists locks of this shard whose oldest entry may be settled by anybody, from a
-- place in the list on.
-- ARGV: 4 how many, 5 score of the last lock seen or -inf, 6 its digest
local no = closed()
if no then return no end
local list = PREFIX .. 'unsettled'
if not is(list, 'zset') then return { 'unavailable', text(NOW), 'the list of unsettled locks is damaged' } end

-- behind compares as a sorted set orders members of one score. Lua's own operator
-- goes by the locale of the server.
local function behind(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return #a > #b
end

local count, score, digest = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local out, start, more = { 'listed', text(NOW) }, 0, true
while more and #out < 2 + 2 * count do
  local batch = redis.call('ZRANGEBYSCORE', list, score, text(NOW), 'WITHSCORES', 'LIMIT', start, count)
  for i = 1, #batch, 2 do
    if #out < 2 + 2 * count and (batch[i + 1] ~= score or behind(batch[i], digest)) then
      out[#out + 1] = batch[i]
      out[#out + 1] = batch[i + 1]
    end
  end
  start, more = start + count, #batch == 2 * count
end
return out
