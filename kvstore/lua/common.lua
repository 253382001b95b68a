-- Put before every script. KEYS[1] is the prefix of all keys; kvstore/index.py documents them in a table.
local prefix = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local ENTRY = 8   -- node number and boot epoch, four bytes each
local FIELD = 16  -- leading bytes of a block hash

-- Entry -> node id, of every node whose heartbeat is fresh. Entries that are not in it are void.
local function live_nodes()
  local live = {}
  local all = redis.call('HGETALL', prefix .. 'nodes')
  for i = 1, #all, 2 do
    if tonumber(string.sub(all[i + 1], ENTRY + 1)) > now then
      live[string.sub(all[i + 1], 1, ENTRY)] = all[i]
    end
  end
  return live
end

local function bucket_of(field)
  return prefix .. 'b:' .. string.sub(field, 1, 2)
end

-- The live entries of a value, without those of one node number (or of none, with '').
local function keep_live(value, live, but_number)
  local kept = {}
  for at = 1, #value, ENTRY do
    local entry = string.sub(value, at, at + ENTRY - 1)
    if live[entry] and string.sub(entry, 1, 4) ~= but_number then
      kept[#kept + 1] = entry
    end
  end
  return table.concat(kept)
end

local function store(bucket, field, value)
  if value == '' then
    redis.call('HDEL', bucket, field)
  else
    redis.call('HSET', bucket, field, value)
  end
end

-- Parts whose time is over; LIMIT bounds what one call cleans up.
local function drop_expired()
  for _, part in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'expiry', '-inf', now, 'LIMIT', 0, 100)) do
    redis.call('ZREM', prefix .. 'expiry', part)
    redis.call('HDEL', prefix .. 'parts', part)
    redis.call('HDEL', prefix .. 'nodes', part)
  end
end
