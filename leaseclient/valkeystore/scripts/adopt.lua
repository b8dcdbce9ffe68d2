#!lua flags=allow-oom
-- Verifies a lease that came in a dispatch envelope, part by part. It changes
-- nothing of the lease.
-- ARGV: 6 lease id, 7 token, 8 the end that the envelope names, 9 execution,
--   10 trace
local no = closed()
if no then return no end
local _, lease, damage = current()
if damage then return corrupt(damage) end
no = late()
if no then return no end
-- A renewal moves the end of the record past that of the envelope; an envelope
-- that claims more than the record is not of this lease.
if not lease or lease.lease_id ~= ARGV[6] or text(lease.fencing_token) ~= ARGV[7] or tonumber(ARGV[8]) > lease.expires_at
  or lease.execution_id ~= ARGV[9] or lease.trace_id ~= ARGV[10] then
  return { 'lease_lost', text(NOW) }
end
return reply_lease({ 'lease_adopted', text(NOW) }, lease.raw)
