#!lua
-- Accepts commits of one lock, in order, all or none. This is the linearization
-- point of every authoritative write.
-- ARGV: 6 canonical identity, 7-13 its components, 14 lease id, 15 principal,
--   16 token, 17 arrival bound ms, 18 maximum entries, 19 maximum bytes,
--   20 attempt, 21 execution, 22 trace, 23 number of commits,
--   then five a commit: id, kind, target, effect, digest of these three
local no = closed()
if no then return no end
local fence, lease, damage = presented()
if damage then return corrupt(damage) end
if not log_ok() then return corrupt('log: wrong type') end
local head
head, damage = oldest()
if damage then return corrupt(damage) end

local count = tonumber(ARGV[23])
local known, fresh, bytes = {}, 0, 0
for i = 1, count do
  local at = 24 + (i - 1) * 5
  local id = ARGV[at]
  local meta = redis.call('HGET', lock('logm'), id)
  if meta then
    known[i] = parse_entry(meta)
    if not known[i] then return corrupt('log: an entry is damaged') end
  else
    local ended = redis.call('HGET', lock('done'), id)
    local outcome, seq, accepted, not_after, expires, digest
    if ended then
      outcome, seq, accepted, not_after, expires, digest =
        string.match(ended, '^(%S+) (%d+) (%d+) (%d+) (%d+) %d+ (%x+)$')
      if not outcome then return corrupt('log: an ending is damaged') end
    end
    -- What was withdrawn before its effect was never done, so it may be asked
    -- for again. Every other ending is final.
    if ended and outcome ~= 'cancelled' then
      known[i] = { seq = seq, accepted = accepted, not_after = not_after, expires = expires, outcome = outcome,
        digest = digest }
    else
      fresh = fresh + 1
      bytes = bytes + #ARGV[at + 2] + #ARGV[at + 3]
    end
  end
end

-- A repeated id must be the same commit, and while it is open of the same lease.
-- A former holder that repeats an id which its successor has in the log would
-- otherwise send it.
local token = tonumber(ARGV[16])
local holds = fence and lease and lease.lease_id == ARGV[14]
  and lease.owner_principal_id == ARGV[15] and lease.fencing_token == token and token >= fence.hwm
local earlier, conflict, in_flight = false, false, nil
for i = 1, count do
  local e, at = known[i], 24 + (i - 1) * 5
  if e then
    if e.digest ~= ARGV[at + 4] then conflict = true end
    if e.outcome then
      -- It ended; whose it was does not matter any more.
    elseif e.lease_id ~= ARGV[14] then
      -- What an earlier lease left is settled first, below.
      if not holds or e.token >= token then return { 'lease_lost', text(NOW) } end
      earlier = true
    elseif e.attempt ~= ARGV[20] then
      in_flight = math.max(in_flight or 0, e.not_after - NOW)
    end
  end
end
if conflict then return { 'idempotency_conflict', text(NOW) } end
-- Two requests with one id may be on their way at once. Only the one that made
-- the entry may send it, end it or withdraw it; the other would do so beside it.
if in_flight then return { 'in_flight', text(NOW), text(in_flight) } end

if fresh > 0 then
  no = late()
  if no then return no end
  if not holds then return { 'lease_lost', text(NOW) } end
end
-- Entries of an earlier lease are finished before anything new begins, and a
-- repeated id among them is no exception. Only the current holder hears of them:
-- another one could wait for a settlement that gets it nothing.
if holds and head and head.token < token then
  return { 'unsettled', text(NOW), text(redis.call('ZCARD', lock('logq'))), text(math.max(0, head.not_after - NOW)) }
end
if earlier then return corrupt('log: its entries are not in the order of their tokens') end
if fresh > 0 then
  if token == fence.hwm and fence.hwm_lease ~= ARGV[14] then
    return corrupt('fence: the high-water mark belongs to another lease of the same token')
  end
  local entries = redis.call('ZCARD', lock('logq'))
  if entries + fresh > tonumber(ARGV[18]) or fence.log_bytes + bytes > tonumber(ARGV[19]) then
    return { 'log_full', text(NOW), text(entries), text(fence.log_bytes) }
  end
end

local out = { 'begun', text(NOW) }
local seq, not_after = fence and fence.seq or 0, NOW + tonumber(ARGV[17])
for i = 1, count do
  local at = 24 + (i - 1) * 5
  local e = known[i]
  if e then
    local num = function(v) return type(v) == 'number' and text(v) or v end
    out[#out + 1] = num(e.seq)
    out[#out + 1] = num(e.accepted)
    out[#out + 1] = num(e.not_after)
    out[#out + 1] = num(e.expires)
    out[#out + 1] = 'repeated'
    out[#out + 1] = e.outcome or ''
  else
    local id = ARGV[at]
    seq = seq + 1
    local size = #ARGV[at + 2] + #ARGV[at + 3]
    redis.call('HDEL', lock('done'), id)
    redis.call('ZREM', lock('doneq'), id)
    redis.call('ZADD', lock('logq'), text(seq), id)
    redis.call('HSET', lock('logm'), id, table.concat({ '1', text(seq), text(token), text(NOW), text(not_after),
      text(lease.expires_at), text(size), ARGV[20], ARGV[at + 4], ARGV[at + 1], ARGV[14], ARGV[21], ARGV[22],
      ARGV[at + 2] }, ' '))
    if ARGV[at + 3] ~= '' then redis.call('HSET', lock('loge'), id, ARGV[at + 3]) end
    out[#out + 1] = text(seq)
    out[#out + 1] = text(NOW)
    out[#out + 1] = text(not_after)
    out[#out + 1] = text(lease.expires_at)
    out[#out + 1] = 'first'
    out[#out + 1] = ''
  end
end
if fresh > 0 then
  redis.call('HSET', lock('fence'), 'seq', text(seq), 'log_bytes', text(fence.log_bytes + bytes), 'hwm', text(token),
    'hwm_lease', ARGV[14])
  if not head then redis.call('ZADD', PREFIX .. 'unsettled', text(not_after), DIGEST) end
end
return out
