-- Drops void entries from some buckets. ARGV: first bucket, number of buckets. Returns entries' fields looked at.
local live, looked = live_nodes(), 0
for number = tonumber(ARGV[1]), tonumber(ARGV[1]) + tonumber(ARGV[2]) - 1 do
  local bucket = prefix .. 'b:' .. struct.pack('>I2', number % 65536)
  local all = redis.call('HGETALL', bucket)
  for i = 1, #all, 2 do
    local kept = keep_live(all[i + 1], live, '')
    if kept ~= all[i + 1] then
      store(bucket, all[i], kept)
    end
    looked = looked + 1
  end
end
return looked
