#!lua flags=allow-oom
-- Reads terminal records of an identity, the latest first.
-- ARGV: 6 canonical identity, 7-13 its components, 14 how many, 15 only tokens
--   below this one
local no = closed()
if no then return no end
local _, _, damage = presented()
if damage then return corrupt(damage) end
no = late()
if no then return no end
if not is(lock('hist'), 'list') then return corrupt('history: wrong type') end

local count, below, more = tonumber(ARGV[14]), tonumber(ARGV[15]), '0'
local out = { 'listed', text(NOW), more }
local rows = 0
for _, v in ipairs(redis.call('LRANGE', lock('hist'), 0, -1)) do
  local ok, entry = pcall(cjson.decode, v)
  if not ok or type(entry) ~= 'table' then return corrupt('history: an entry is malformed') end
  local token, ended = number(entry.fencing_token), number(entry.ended_at)
  if not token or not ended then return corrupt('history: an entry is malformed') end
  if token < below and ended + HISTORY_MS > NOW then
    if rows == count then
      out[3] = '1'
      break
    end
    rows = rows + 1
    for _, name in ipairs(FIELDS) do
      if type(entry[name]) ~= 'string' then return corrupt('history: ' .. name .. ' is missing') end
      out[#out + 1] = entry[name]
    end
    out[#out + 1] = entry.ended_at
    for _, name in ipairs({ 'ended_by', 'reason', 'incident_id' }) do
      out[#out + 1] = type(entry[name]) == 'string' and entry[name] or ''
    end
  end
end
return out
