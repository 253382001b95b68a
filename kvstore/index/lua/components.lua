-- Lists the live components. Returns now, then "heartbeat-ms record" of each.
local now = now_ms()
local answer = {now}
for _, component in ipairs(redis.call('ZRANGEBYSCORE', expiry, '(' .. string.format('%.0f', now), '+inf')) do
  local record = redis.call('HGET', components, component)
  if record then
    answer[#answer + 1] = record
  end
end
return answer
