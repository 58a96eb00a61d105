-- take_over(holder, epoch) -> 1, or 0 if it is not higher than every one before
-- {app}:epoch; {app}:lease:{id} and {app}:lease:index of every live lease, which counts as renewed now by its own ttl; but not of
-- one that the takeover before renewed, and its worker has not renewed since.

verbs.take_over = function()
  local holder, epoch = take(2)
  if tonumber(epoch) <= tonumber(redis.call('HGET', key.epoch, 'epoch') or 0) then
    return '0'
  end
  local earlier = tonumber(redis.call('HGET', key.epoch, 'taken_over_at') or '')
  write('HSET', key.epoch, 'epoch', epoch, 'holder', holder, 'taken_over_at', text(now.lease))
  for _, id in ipairs(redis.call('ZRANGE', key.index, 0, -1)) do
    local job = jobs.load(id)
    if job and job.ttl_s and (not earlier or earlier > now.lease or leases.heard_since(job, earlier)) then
      leases.extend(job, job.ttl_s)
    end
  end
  return '1'
end
