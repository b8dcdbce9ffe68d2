#!lua
-- Makes the marker of one shard, once.
-- ARGV: 1 generation, 2 shards, 3 epoch (in the place of the deadline)
if not is(KEYS[1], 'hash') then return { 'conflict', text(NOW), 'the marker key holds something else' } end
local m, n = hash(KEYS[1])
if n == 0 then
  redis.call('HSET', KEYS[1], 'version', '1', 'generation', GENERATION, 'shards', SHARDS, 'epoch', ARGV[3],
    'state', 'ready', 'history', '')
  return { 'made', text(NOW) }
end
if m.version == '1' and m.generation == GENERATION and m.shards == SHARDS and m.epoch == ARGV[3] then
  return { 'exists', text(NOW) }
end
return { 'conflict', text(NOW), 'the shard has a marker with other settings' }
