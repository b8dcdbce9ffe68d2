#!lua flags=no-writes
-- Lists locks of this shard whose oldest entry may be settled by anybody.
-- ARGV: 4 how many
local no = closed()
if no then return no end
if not is(PREFIX .. 'unsettled', 'zset') then return { 'unavailable', text(NOW), 'the list of unsettled locks is damaged' } end
local out = redis.call('ZRANGEBYSCORE', PREFIX .. 'unsettled', '-inf', text(NOW), 'LIMIT', 0, DIGEST)
table.insert(out, 1, text(NOW))
table.insert(out, 1, 'listed')
return out
