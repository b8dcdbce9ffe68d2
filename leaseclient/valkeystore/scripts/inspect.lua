#!lua flags=allow-oom
-- Reads the current record of an identity. It may write to the list of corrupt
-- locks, and to nothing else.
-- ARGV: 6 canonical identity, 7-13 its components
local no = closed()
if no then return no end
local _, lease, damage = presented()
if damage then return corrupt(damage) end
no = late()
if no then return no end
if not lease then return { 'lease_not_found', text(NOW) } end
if lease.expires_at <= NOW then lease.raw[26] = 'expired' end
return reply_lease({ 'lease_inspected', text(NOW) }, lease.raw)
