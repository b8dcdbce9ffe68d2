#!lua flags=no-writes
-- Reads the namespace marker of one shard, so that a client learns how the
-- namespace is laid out and what time the store has.
local m, n = hash(KEYS[1])
if n == 0 then return { 'unavailable', text(NOW), 'the namespace has no marker' } end
if m.version ~= '1' or not number(m.generation) or not number(m.shards) or not number(m.epoch) or not m.history then
  return { 'unavailable', text(NOW), 'the namespace marker is damaged or of an unknown version' }
end
if m.state ~= 'ready' then return { 'unavailable', text(NOW), 'the namespace is not ready' } end
return { 'ready', text(NOW), m.generation, m.shards, m.epoch }
