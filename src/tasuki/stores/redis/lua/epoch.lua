-- epoch() -> {epoch, holder}
-- Reads {app}:epoch.

reads.epoch = function()
  local row = redis.call('HMGET', key.epoch, 'epoch', 'holder')
  return { row[1] or '0', row[2] or '' }
end
