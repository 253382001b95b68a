-- Adds and removes a node's entry at arrived and evicted blocks. KEYS: generation, then buckets.
-- ARGV: entry (8 bytes), fresh generation, max entries per block, then per bucket: fields added, fields removed.
-- Also removes the node's entries of earlier boots at these blocks. Returns the generation.
local entry, most = ARGV[1], tonumber(ARGV[3])
local number = string.sub(entry, 1, 4)

-- The newest entries of other nodes, with room for one more.
local function others(value)
  local kept = {}
  for _, other in ipairs(pieces(value or '', ENTRY)) do
    if string.sub(other, 1, 4) ~= number then
      kept[#kept + 1] = other
    end
  end
  return table.concat(kept, '', math.max(1, #kept - most + 2))
end

local function update(bucket, fields, added)
  if #fields == 0 then
    return
  end
  local values = redis.call('HMGET', bucket, unpack(fields))
  local set, drop = {}, {}
  for i, field in ipairs(fields) do
    local value = others(values[i]) .. added
    if value ~= '' then
      set[#set + 1] = field
      set[#set + 1] = value
    elseif values[i] then
      drop[#drop + 1] = field
    end
  end
  if #set > 0 then
    redis.call('HSET', bucket, unpack(set))
  end
  if #drop > 0 then
    redis.call('HDEL', bucket, unpack(drop))
  end
end

for i = 2, #KEYS do
  own(KEYS[i], 'hash')
  update(KEYS[i], pieces(ARGV[2 * i], FIELD), entry)
  update(KEYS[i], pieces(ARGV[2 * i + 1], FIELD), '')
end
return generation(KEYS[1], ARGV[2])
