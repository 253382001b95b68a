-- Every live part. Returns now, then "beat-ms record" of each.
local answer = {now}
for _, part in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'expiry', '(' .. now, '+inf')) do
  local record = redis.call('HGET', prefix .. 'parts', part)
  if record then
    answer[#answer + 1] = record
  end
end
return answer
