#!lua flags=allow-oom
-- Gives a claim up before it runs out.
-- ARGV: 6 claimer
local no = closed()
if no then return no end
if not is(lock('claim'), 'hash') then return corrupt('log: wrong type') end
if redis.call('HGET', lock('claim'), 'claimer') == ARGV[6] then redis.call('DEL', lock('claim')) end
return { 'unclaimed', text(NOW) }
