-- Writes or reads a KV node's record of prefix pins. KEYS: the record.
-- ARGV: ttl in ms and the record to write, or 0 to read. Returns the record read, or ''.
own(KEYS[1], 'string')
if ARGV[1] ~= '0' then
  redis.call('SET', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  return ''
end
return redis.call('GET', KEYS[1]) or ''
