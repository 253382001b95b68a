-- Lists live components. ARGV: a time in ms.
-- Returns now, the number of live components, and a line for each whose heartbeat is not older than that time: its id,
-- a tab, and "heartbeat-ms record". A record is JSON without line breaks.
local CHUNK = 1000  -- arguments of one call
local since = ARGV[1]
local now = now_ms()
local live = live_after(judged_at(now))
local count, lines = 0, {}
for first = 1, #live, CHUNK do
  local last = math.min(first + CHUNK - 1, #live)
  local records = redis.call('HMGET', components, unpack(live, first, last))
  for at = 1, #records do
    local record = records[at]
    if record then
      count = count + 1
      if string.sub(record, 1, #since) >= since then
        lines[#lines + 1] = live[first + at - 1] .. '\t' .. record
      end
    end
  end
end
return {now, count, table.concat(lines, '\n')}
