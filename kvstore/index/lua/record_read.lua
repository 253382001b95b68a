-- Reads bundles of the recorder. KEYS: as in record_keep.lua.
-- ARGV: an id, to return its bundle or ''; or '', first and last place, to return their 'ID BYTES', newest first.
own(KEYS[1], 'hash')
own(KEYS[2], 'zset')
if ARGV[1] ~= '' then
  return redis.call('HGET', KEYS[1], ARGV[1]) or ''
end
return redis.call('ZREVRANGE', KEYS[2], ARGV[2], ARGV[3])
