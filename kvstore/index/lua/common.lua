-- Prefixed to every script. A script only touches the keys that it is given (kvstore/index/redis_keys.py).
local ENTRY = 8  -- node number and boot epoch, four bytes each
local FIELD = 8  -- leading bytes of a block hash

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Cuts a packed string into pieces of `width` bytes.
local function pieces(packed, width)
  local list = {}
  for at = 1, #packed - width + 1, width do
    list[#list + 1] = string.sub(packed, at, at + width - 1)
  end
  return list
end

-- Deletes a foreign value of another type under our key.
local function own(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    redis.call('DEL', key)
  end
end

-- Returns the value whose loss reveals the loss of a group's buckets; sets it to `fresh` if missing.
local function generation(key, fresh)
  own(key, 'string')
  redis.call('SET', key, fresh, 'NX')
  return redis.call('GET', key)
end
