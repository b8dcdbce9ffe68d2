#!lua flags=allow-oom
-- Hands out entries of one lock to a settler, and the right to end them.
-- ARGV: 6 mode, 7 claimer, 8 how long the claim stands in ms, 9 token for
--   "before", 10 maximum entries, 11 maximum bytes, 12 number of ids, then ids
local no = closed()
if no then return no end
no = late()
if no then return no end
local fence, lease, damage = current()
if damage then return corrupt(damage) end
if not log_ok() then return corrupt('log: wrong type') end
local head
head, damage = oldest()
if damage then return corrupt(damage) end
if head and not fence then return corrupt('fence: the counter is gone, its log is not') end

local mode, claimer, ids = ARGV[6], ARGV[7], tonumber(ARGV[12])
local function answer(wait, settled, entries, ended)
  local out = { 'claimed', text(NOW), text(wait), settled, fence and fence.identity or '', text(#entries) }
  for _, e in ipairs(entries) do
    out[#out + 1] = e.id
    out[#out + 1] = e.meta
    out[#out + 1] = redis.call('HGET', lock('loge'), e.id) or ''
  end
  for _, v in ipairs(ended or {}) do out[#out + 1] = v end
  return out
end

-- The endings of named entries are told in any case: somebody else may have
-- finished them.
local ended, wanted, open = {}, {}, 0
if mode == 'own' then
  for i = 1, ids do
    local id = ARGV[12 + i]
    local done = redis.call('HGET', lock('done'), id)
    if redis.call('HEXISTS', lock('logm'), id) == 1 then
      wanted[id] = true
      open = open + 1
    elseif done then
      local outcome = string.match(done, '^(%S+) ')
      if not outcome then return corrupt('log: an ending is damaged') end
      ended[#ended + 1] = id
      ended[#ended + 1] = outcome
    end
  end
  if open == 0 then return answer(0, 'settled', {}, ended) end
elseif not head or (mode == 'before' and head.token >= tonumber(ARGV[9])) then
  return answer(0, 'settled', {}, ended)
end

-- The sweeper leaves a lease alone that still stands: its own sidecar finishes.
if mode == 'sweep' and lease and lease.lease_id == head.lease_id then
  redis.call('ZADD', PREFIX .. 'unsettled', text(lease.expires_at), DIGEST)
  return answer(lease.expires_at - NOW, 'open', {}, ended)
end
if mode ~= 'own' and head.not_after > NOW then return answer(head.not_after - NOW, 'open', {}, ended) end

local claim = hash(lock('claim'))
local stands = (number(claim['until']) or 0) - NOW
if stands > 0 and claim.claimer ~= claimer then return answer(stands, 'open', {}, ended) end

local max_entries, max_bytes, bytes, entries = tonumber(ARGV[10]), tonumber(ARGV[11]), 0, {}
local start, step = 0, 100
while #entries < max_entries do
  local batch = redis.call('ZRANGE', lock('logq'), start, start + step - 1)
  local full = false
  for _, id in ipairs(batch) do
    if mode ~= 'own' or wanted[id] then
      local meta = redis.call('HGET', lock('logm'), id)
      local e = parse_entry(meta)
      if not e then return corrupt('log: an entry is damaged') end
      if (mode ~= 'own' and e.not_after > NOW) or (mode == 'before' and e.token >= tonumber(ARGV[9]))
        or #entries >= max_entries or (#entries > 0 and bytes + e.bytes > max_bytes) then
        full = true
        break
      end
      e.id, e.meta = id, meta
      bytes = bytes + e.bytes
      entries[#entries + 1] = e
    end
  end
  if full or #batch < step then break end
  start = start + step
end
local deadline = NOW + tonumber(ARGV[8])
redis.call('HSET', lock('claim'), 'claimer', claimer, 'until', text(deadline))
redis.call('PEXPIREAT', lock('claim'), text(deadline))
return answer(0, 'open', entries, ended)
