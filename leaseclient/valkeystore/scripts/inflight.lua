#!lua flags=allow-oom
-- Counts the accepted commits of a lock that have not ended.
local no = closed()
if no then return no end
no = late()
if no then return no end
if not log_ok() then return corrupt('log: wrong type') end
return { 'counted', text(NOW), text(redis.call('ZCARD', lock('logq'))) }
