-- Put before every script. Scripts touch only keys that they are given (kvstore/index/redis_keys.py says which exist).
local ENTRY = 8  -- node number and boot epoch, four bytes each
local FIELD = 8  -- leading bytes of a block hash

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The pieces of a packed string.
local function pieces(packed, width)
  local list = {}
  for at = 1, #packed - width + 1, width do
    list[#list + 1] = string.sub(packed, at, at + width - 1)
  end
  return list
end

-- What somebody else put under our key with another type goes: it is ours.
local function own(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    redis.call('DEL', key)
  end
end

-- The value that tells later whether a group's buckets were lost; `fresh` is taken where there is none.
local function generation(key, fresh)
  own(key, 'string')
  redis.call('SET', key, fresh, 'NX')
  return redis.call('GET', key)
end
