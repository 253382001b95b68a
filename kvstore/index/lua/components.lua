-- Every live part. Returns now, then "beat-ms record" of each.
local now = now_ms()
local answer = {now}
for _, part in ipairs(redis.call('ZRANGEBYSCORE', expiry, '(' .. string.format('%.0f', now), '+inf')) do
  local record = redis.call('HGET', parts, part)
  if record then
    answer[#answer + 1] = record
  end
end
return answer
