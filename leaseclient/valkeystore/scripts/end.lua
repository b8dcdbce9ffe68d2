#!lua flags=allow-oom
-- Takes entries out of the log, each with its outcome.
-- ARGV: 6 claimer or empty, 7 how long endings are kept in ms, 8 how many,
--   9 how many may be set aside, 10 number of endings,
--   then three an ending: id, outcome, attempt or empty
local no = closed()
if no then return no end
local fence, damage = load_fence(nil)
if damage then return corrupt(damage) end
if not log_ok() then return corrupt('log: wrong type') end
if not fence then
  if redis.call('EXISTS', lock('logq'), lock('logm')) > 0 then return corrupt('fence: the counter is gone, its log is not') end
  return { 'ended', text(NOW), '0' }
end
if ARGV[6] ~= '' then
  local claim = hash(lock('claim'))
  if claim.claimer ~= ARGV[6] or (number(claim['until']) or 0) <= NOW then return { 'lease_lost', text(NOW) } end
end

-- Everything is read before anything is taken out.
local count, entries, aside, seen = tonumber(ARGV[10]), {}, 0, {}
for i = 1, count do
  local at = 11 + (i - 1) * 3
  local id, outcome, attempt = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local meta = redis.call('HGET', lock('logm'), id)
  if meta and not seen[id] then
    local e = parse_entry(meta)
    if not e then return corrupt('log: an entry is damaged') end
    if attempt == '' or attempt == e.attempt then
      seen[id] = true
      e.id, e.outcome, e.meta = id, outcome, meta
      if outcome == 'quarantined' then aside = aside + 1 end
      entries[#entries + 1] = e
    end
  end
end
if aside > 0 and redis.call('HLEN', lock('qtn')) + aside > tonumber(ARGV[9]) then
  return { 'quarantine_full', text(NOW) }
end

local bytes = fence.log_bytes
for _, e in ipairs(entries) do
  if e.outcome == 'quarantined' then
    redis.call('HSET', lock('qtn'), e.id, e.meta)
    local effect = redis.call('HGET', lock('loge'), e.id)
    if effect then redis.call('HSET', lock('qte'), e.id, effect) end
  end
  redis.call('ZREM', lock('logq'), e.id)
  redis.call('HDEL', lock('logm'), e.id)
  redis.call('HDEL', lock('loge'), e.id)
  redis.call('HSET', lock('done'), e.id, table.concat({ e.outcome, text(e.seq), text(e.accepted), text(e.not_after),
    text(e.expires), text(NOW), e.digest }, ' '))
  redis.call('ZADD', lock('doneq'), text(NOW), e.id)
  bytes = bytes - e.bytes
end
if #entries > 0 then
  redis.call('HSET', lock('fence'), 'log_bytes', text(math.max(0, bytes)))
  local old = redis.call('ZRANGEBYSCORE', lock('doneq'), '-inf', text(NOW - tonumber(ARGV[7])), 'LIMIT', 0, 200)
  local over = redis.call('ZCARD', lock('doneq')) - tonumber(ARGV[8])
  if over > #old then old = redis.call('ZRANGE', lock('doneq'), 0, math.min(over, 200) - 1) end
  for _, id in ipairs(old) do
    redis.call('ZREM', lock('doneq'), id)
    redis.call('HDEL', lock('done'), id)
  end
  redis.call('PEXPIRE', lock('doneq'), ARGV[7])
  redis.call('PEXPIRE', lock('done'), ARGV[7])
end
local head = oldest()
if head then
  redis.call('ZADD', PREFIX .. 'unsettled', text(head.not_after), DIGEST)
elseif redis.call('ZCARD', lock('logq')) == 0 then
  redis.call('ZREM', PREFIX .. 'unsettled', DIGEST)
  redis.call('DEL', lock('claim'))
end
return { 'ended', text(NOW), text(#entries) }
