-- Lists the live components. Returns now, then "heartbeat-ms record" of each.
local now = now_ms()
local answer = {now}
for _, component in ipairs(live_after(judged_at(now))) do
  local record = redis.call('HGET', components, component)
  if record then
    answer[#answer + 1] = record
  end
end
return answer
