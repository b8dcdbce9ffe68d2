-- What every script shares. It is put in front of each of them, behind the
-- first line that names the engine.
--
-- One key is declared, the marker of the shard. All others are derived from it:
-- they share its hash tag, so they live in one slot, and a record names further
-- keys (a lease id) that the caller cannot know.
--
-- Rules that hold for all scripts:
--   * the clock is read once, and every decision uses that reading;
--   * everything is read and judged before the first write, since an error
--     in the middle of a script does not take back what it has written;
--   * a key of the wrong type or a record that is not whole is left as it is,
--     listed as corrupt, and nothing is granted over it;
--   * numbers are written with text(), never by the JSON library, which would
--     round them to 14 digits.
local PREFIX = string.sub(KEYS[1], 1, -7)
local clock = redis.call('TIME')
local NOW = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local MAX_NUMBER = 9007199254740991
local LOCK_PREFIX = 'starintel:target-lease:v1:'

local GENERATION, SHARDS, DEADLINE = ARGV[1], ARGV[2], tonumber(ARGV[3])
local DIGEST, LOCK_KEY = ARGV[4], ARGV[5]

-- The order in which a record crosses the wire.
local FIELDS = {
  'record_version', 'lock_key', 'tenant_id', 'program_id', 'target_namespace', 'target_id',
  'actor_name', 'workflow_name', 'operation_class', 'lease_id', 'owner_principal_id',
  'owner_client_id', 'owner_credential_id', 'service_instance_id', 'fencing_token',
  'acquired_at', 'renewed_at', 'expires_at', 'ttl_ms', 'maximum_lifetime_ms', 'execution_id',
  'job_id', 'trace_id', 'request_id', 'metadata', 'state',
}

-- text writes an integer exactly.
local function text(n) return string.format('%.0f', n) end

-- number reads an integer in its only spelling, or returns nil.
local function number(s)
  if type(s) ~= 'string' or #s > 16 then return nil end
  if s ~= '0' and not string.match(s, '^[1-9]%d*$') then return nil end
  local n = tonumber(s)
  if n > MAX_NUMBER then return nil end
  return n
end

-- is reports whether a key is absent or of a kind.
local function is(key, kind)
  local t = redis.call('TYPE', key)['ok']
  return t == 'none' or t == kind
end

-- hash reads a hash and how many fields it has.
local function hash(key)
  local flat = redis.call('HGETALL', key)
  local t = {}
  for i = 1, #flat, 2 do t[flat[i]] = flat[i + 1] end
  return t, #flat / 2
end

-- key names of this lock
local function lock(name) return PREFIX .. name .. ':' .. DIGEST end

local MAX_CORRUPT = 1000

-- corrupt lists the lock for an operator and answers that nothing was done.
local function corrupt(what)
  local list = PREFIX .. 'corrupt'
  if is(list, 'hash') and redis.call('HLEN', list) < MAX_CORRUPT then
    redis.call('HSET', list, DIGEST, text(NOW) .. ' ' .. what)
  end
  return { 'corrupt', text(NOW), what }
end

-- closed returns the answer to give when the namespace is not open for work.
local function closed()
  local function no(why) return { 'unavailable', text(NOW), why } end
  if not is(KEYS[1], 'hash') then return no('the namespace marker is not a hash') end
  local m, n = hash(KEYS[1])
  if n == 0 then return no('the namespace has no marker') end
  if m.version ~= '1' then return no('the namespace marker has an unknown version') end
  if not number(m.generation) or not number(m.shards) or not number(m.epoch) or not m.history then
    return no('the namespace marker is damaged')
  end
  if m.state ~= 'ready' then return no('the namespace is not ready') end
  if m.generation ~= GENERATION or m.shards ~= SHARDS then
    return { 'moved', text(NOW), 'the namespace has another generation' }
  end
  return nil, number(m.epoch)
end

-- late answers when the caller's time is up.
local function late()
  if NOW >= DEADLINE then return { 'deadline_exceeded', text(NOW) } end
  return nil
end

-- load_fence reads the durable half of a lock: its counter, its high-water mark
-- and the book-keeping of its log. It returns nil where there is none yet, and
-- a text when it is not whole. The identity is compared where the caller
-- presents one.
local function load_fence(canonical)
  if not is(lock('fence'), 'hash') then return nil, 'fence: wrong type' end
  local f, n = hash(lock('fence'))
  if n == 0 then return nil end
  if n ~= 9 or f.v ~= '1' then return nil, 'fence: unknown version or fields' end
  if f.lock_key ~= LOCK_KEY then return nil, 'fence: another lock key' end
  if not f.identity or (canonical and f.identity ~= canonical) then return nil, 'fence: another identity' end
  f.token, f.hwm, f.seq, f.log_bytes = number(f.token), number(f.hwm), number(f.seq), number(f.log_bytes)
  if not f.token or not f.hwm or not f.seq or not f.log_bytes or not number(f.created_at) or not f.hwm_lease then
    return nil, 'fence: a number is missing or malformed'
  end
  if f.token == 0 or f.hwm > f.token then return nil, 'fence: the high-water mark is above the counter' end
  if (f.hwm == 0) ~= (f.hwm_lease == '') then return nil, 'fence: the high-water mark has no lease' end
  return f
end

local TIMES = { 'fencing_token', 'acquired_at', 'renewed_at', 'expires_at', 'ttl_ms', 'maximum_lifetime_ms' }

-- load_lease reads the active record. It returns nil where there is none, and
-- a text when it is not whole or not this identity's. Numbers become numbers;
-- the record as stored stays in .raw.
local function load_lease(fence, identity_at)
  local key = lock('lease')
  if not is(key, 'hash') then return nil, 'lease: wrong type' end
  local r, n = hash(key)
  if n == 0 then return nil end
  if n ~= #FIELDS then return nil, 'lease: unknown or missing fields' end
  local raw = {}
  for i, name in ipairs(FIELDS) do
    if not r[name] then return nil, 'lease: ' .. name .. ' is missing' end
    raw[i] = r[name]
  end
  if r.record_version ~= '1' then return nil, 'lease: unknown record version' end
  if r.state ~= 'active' then return nil, 'lease: not in state active' end
  if r.lock_key ~= LOCK_KEY then return nil, 'lease: another lock key' end
  if identity_at then
    for i = 0, 6 do
      if r[FIELDS[3 + i]] ~= ARGV[identity_at + i] then return nil, 'lease: another identity' end
    end
  end
  for _, name in ipairs(TIMES) do
    r[name] = number(r[name])
    if not r[name] then return nil, 'lease: ' .. name .. ' is not a number' end
  end
  if r.renewed_at < r.acquired_at or r.expires_at <= r.renewed_at or r.ttl_ms == 0
    or r.expires_at > r.acquired_at + r.maximum_lifetime_ms or r.expires_at > r.renewed_at + r.ttl_ms then
    return nil, 'lease: its times contradict each other'
  end
  for _, name in ipairs({ 'lease_id', 'owner_principal_id', 'service_instance_id', 'request_id' }) do
    if r[name] == '' then return nil, 'lease: ' .. name .. ' is empty' end
  end
  if redis.call('PEXPIRETIME', key) < 0 then return nil, 'lease: it never leaves the store' end
  if not fence then return nil, 'lease: there is no counter' end
  if r.fencing_token ~= fence.token then return nil, 'lease: its token is not the counter' end
  r.raw = raw
  return r
end

-- same reports whether the record is of exactly this lease, owner, instance and
-- token, and still valid at this instant.
local function same(r, lease_id, principal, instance, token)
  return r and r.expires_at > NOW and r.lease_id == lease_id and r.owner_principal_id == principal
    and r.service_instance_id == instance and text(r.fencing_token) == token
end

-- keep lets a key live for so many milliseconds from now, and no shorter than it
-- would. A result and the evidence that it points at are kept by the same
-- reading of the clock, so that the evidence never goes first.
local function keep(key, ms)
  local at = NOW + tonumber(ms)
  if redis.call('PEXPIRETIME', key) < at then redis.call('PEXPIREAT', key, text(at)) end
end

local DAY_MS = 24 * 3600 * 1000

-- Active leases are listed by owner, by target and by program, each within one
-- tenant and program. An index holds digests only, all with the score 0, so that
-- its order never changes; every row is judged by its record when it is read.
local function index_of(kind, parts)
  local s = kind
  for _, v in ipairs(parts) do s = s .. ' ' .. #v .. ':' .. v end
  return PREFIX .. 'ix:' .. redis.sha1hex(s)
end

-- indexes names the indexes of a record in wire order.
local function indexes(raw)
  return {
    index_of('owner', { raw[3], raw[4], raw[11] }),
    index_of('target', { raw[3], raw[4], raw[5], raw[6] }),
    index_of('program', { raw[3], raw[4] }),
  }
end

-- indexes_ok reports whether they can be written.
local function indexes_ok(raw)
  for _, key in ipairs(indexes(raw)) do
    if not is(key, 'zset') then return false end
  end
  return true
end

-- notify tells everybody who watches that a lease has ended before its time. A
-- notice that cannot be sent is no failure: nothing depends on it.
local function notify(what, r)
  local channel = string.match(PREFIX, '^({.*):s%d+}:$') .. '}:notices'
  redis.pcall('PUBLISH', channel, table.concat({ '1', what, LOCK_KEY, r.lease_id, text(r.fencing_token) }, ' '))
end

local MAX_HISTORY = 100
local HISTORY_MS = 30 * DAY_MS

-- retirable reports whether retire() will be able to write.
local function retirable(r)
  return is(lock('hist'), 'list') and is(PREFIX .. 'lid:' .. r.lease_id, 'hash') and indexes_ok(r.raw)
end

-- retire keeps the terminal evidence of a record and takes the record out of
-- force. The evidence is kept for as long as a result may point at it: so many
-- milliseconds from now, or, without a number, as long as it is kept already.
-- The last argument holds more members of the history entry.
local function retire(r, state, at, retention, more)
  local key = PREFIX .. 'lid:' .. r.lease_id
  local flat, entry = {}, {}
  for i, name in ipairs(FIELDS) do
    local v = r.raw[i]
    if name == 'state' then v = state end
    flat[#flat + 1] = name
    flat[#flat + 1] = v
    entry[name] = v
  end
  entry.ended_at = text(at)
  for name, v in pairs(more or {}) do entry[name] = v end
  redis.call('HSET', key, 'ended_at', entry.ended_at, unpack(flat))
  if retention then
    keep(key, retention)
  elseif redis.call('PEXPIRETIME', key) < 0 then
    keep(key, DAY_MS)
  end
  redis.call('LPUSH', lock('hist'), cjson.encode(entry))
  redis.call('LTRIM', lock('hist'), 0, MAX_HISTORY - 1)
  redis.call('PEXPIRE', lock('hist'), HISTORY_MS)
  for _, name in ipairs(indexes(r.raw)) do redis.call('ZREM', name, DIGEST) end
  redis.call('DEL', lock('lease'))
end

-- Leases whose end this call was the first to see, in wire order. They go out
-- with the answer, so that exactly one client reports each of them.
local SEEN = {}

-- over retires a lease that has run out, so that it stays over even if the clock
-- goes back. It returns what is left of it: the lease while it is active, nil
-- afterwards; and a text when its end cannot be recorded.
local function over(r)
  if not r or r.expires_at > NOW then return r end
  if not retirable(r) then return nil, 'history, evidence or index: wrong type' end
  retire(r, 'expired', r.expires_at)
  r.raw[26] = 'expired'
  SEEN[#SEEN + 1] = r.raw
  return nil
end

-- evidence_of reads the evidence of a lease, in wire order, for an answer to a
-- repeated request. It returns nil and a text when it is not whole or another
-- lock's.
local function evidence_of(lease_id)
  local key = PREFIX .. 'lid:' .. lease_id
  if not is(key, 'hash') then return nil, 'evidence: wrong type' end
  local found, raw = hash(key), {}
  for i, name in ipairs(FIELDS) do
    if not found[name] then return nil, 'evidence: ' .. name .. ' is missing' end
    raw[i] = found[name]
  end
  if found.lock_key ~= LOCK_KEY then return nil, 'evidence: another lock key' end
  return raw
end

-- state_of says what became of a lease, from its evidence and the record.
local function state_of(lease_id, recorded, r)
  if recorded ~= 'active' then return recorded end
  if r and r.lease_id == lease_id and r.expires_at > NOW then return 'active' end
  return 'expired'
end

-- reply_lease appends a record in wire order.
local function reply_lease(out, raw)
  for i = 1, #FIELDS do out[#out + 1] = raw[i] end
  return out
end

-- Entries of the commit log. logq orders ids by their position, logm holds what
-- is known of each, loge the effects. The parts are separated by one space; only
-- the last, the target, may hold spaces itself.
local function parse_entry(meta)
  local e = {}
  e.seq, e.token, e.accepted, e.not_after, e.expires, e.bytes, e.attempt, e.digest, e.kind, e.lease_id, e.execution,
    e.trace, e.target =
    string.match(meta or '', '^1 (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (%x+) (%S+) (%S+) (%S+) (%S+) (.*)$')
  if not e.seq then return nil end
  for _, name in ipairs({ 'seq', 'token', 'accepted', 'not_after', 'expires', 'bytes' }) do
    e[name] = number(e[name])
    if not e[name] then return nil end
  end
  return e
end

-- current reads the fence and the active lease of the lock; one that has run
-- out is recorded as expired and is not active. The third result is what is
-- wrong with one of them.
local function current(canonical, identity_at)
  local fence, damage = load_fence(canonical)
  if damage then return nil, nil, damage end
  local lease
  lease, damage = load_lease(fence, identity_at)
  if damage then return nil, nil, damage end
  lease, damage = over(lease)
  return fence, lease, damage
end

-- presented does the same for the identity that the caller presents.
local function presented() return current(ARGV[6], 7) end

-- log_ok reports whether the keys of the log have their types.
local function log_ok()
  return is(lock('logq'), 'zset') and is(lock('logm'), 'hash') and is(lock('loge'), 'hash')
    and is(lock('done'), 'hash') and is(lock('doneq'), 'zset') and is(PREFIX .. 'unsettled', 'zset')
    and is(lock('claim'), 'hash') and is(lock('qtn'), 'hash') and is(lock('qte'), 'hash')
end

-- oldest returns the first entry of the log, nil when it is empty, and a text
-- when it is damaged.
local function oldest()
  local id = redis.call('ZRANGE', lock('logq'), 0, 0)[1]
  if not id then return nil end
  local e = parse_entry(redis.call('HGET', lock('logm'), id))
  if not e then return nil, 'log: an entry is damaged' end
  e.id = id
  return e
end
