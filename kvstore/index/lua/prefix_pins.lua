-- Writes a KV node's record of prefix pins, or reads it. KEYS: the record.
-- ARGV: its time to live in ms, and the record; 0: it is read. Returns the record that was read, or ''.
own(KEYS[1], 'string')
if ARGV[1] ~= '0' then
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  return ''
end
return redis.call('GET', KEYS[1]) or ''
