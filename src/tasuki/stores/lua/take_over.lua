-- take_over(holder, epoch) -> 1, or 0 if it is not higher than every one before
-- {app}:epoch; {app}:lease:{id} and {app}:lease:index of every live lease, which counts as renewed now by its own ttl.

verbs.take_over = function()
  local holder, epoch = take(2)
  if tonumber(epoch) <= tonumber(redis.call('HGET', key.epoch, 'epoch') or 0) then
    return '0'
  end
  write('HSET', key.epoch, 'epoch', epoch, 'holder', holder)
  for _, id in ipairs(redis.call('ZRANGE', key.index, 0, -1)) do
    local job = jobs.load(id)
    if job and job.ttl_s then
      leases.extend(job, job.ttl_s)
    end
  end
  return '1'
end
