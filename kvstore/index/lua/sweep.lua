-- Walks through buckets of one group and removes void entries. KEYS: generation, then buckets.
-- ARGV: fresh generation; void entries, packed; cursor in the first bucket; max fields to visit.
-- Returns the generation, the number of buckets done, the cursor in the next one, and the other entries seen, packed.
local void, cursor, budget = {}, ARGV[3], tonumber(ARGV[4])
for _, entry in ipairs(pieces(ARGV[2], ENTRY)) do
  void[entry] = true
end
local seen, list, done = {}, {}, 0

local function kept(value)
  local good = {}
  for _, entry in ipairs(pieces(value, ENTRY)) do
    if not void[entry] then
      good[#good + 1] = entry
      if not seen[entry] then
        seen[entry] = true
        list[#list + 1] = entry
      end
    end
  end
  return table.concat(good)
end

-- Visits some fields of a bucket, or all of a small one. Returns the cursor.
local function walk(bucket)
  local step = redis.call('HSCAN', bucket, cursor, 'COUNT', budget)
  for i = 1, #step[2], 2 do
    local field, value = step[2][i], step[2][i + 1]
    local now = kept(value)
    if now == '' then
      redis.call('HDEL', bucket, field)
    elseif now ~= value then
      redis.call('HSET', bucket, field, now)
    end
    budget = budget - 1
  end
  return step[1]
end

-- Most groups of a small index have no bucket, which one call shows. If that is refused, ask for each bucket.
if redis.pcall('EXISTS', unpack(KEYS, 2)) == 0 then
  done = #KEYS - 1
end
while done < #KEYS - 1 and budget > 0 do
  own(KEYS[done + 2], 'hash')
  cursor = walk(KEYS[done + 2])
  if cursor == '0' then
    done = done + 1
  end
end
return {generation(KEYS[1], ARGV[1]), done, cursor, table.concat(list)}
