-- The right to run one attempt. The job's record knows whose it is, and {app}:lease:index when it may be taken from its worker.
-- Outsiders may read {app}:lease:{id}. An ORPHANED job has a lease that stands in no index.

local leases = {}

-- When it may be taken from its worker.
function leases.over_at(id)
  return tonumber(redis.call('ZSCORE', key.index, id) or 0)
end

-- Until when it is the worker's; one that is kept may not be taken at once then.
function leases.expires_at(job)
  return job.expires_at or text(leases.over_at(job.id))
end

local ends = {} -- ttl_s -> when a lease ends that is given now

local function count_from_now(job)
  local expires_at = ends[job.ttl_s]
  if not expires_at then
    expires_at = text(now.lease + tonumber(job.ttl_s) + LEASE_MARGIN_S)
    ends[job.ttl_s] = expires_at
  end
  if job.keep then
    jobs.set(job, { expires_at = expires_at })
    rank(key.index, text(tonumber(expires_at) + tonumber(job.reconnect_grace_s)), job.id)
  else
    rank(key.index, expires_at, job.id)
  end
  return expires_at
end

-- The one that the record speaks of is new.
function leases.show(job)
  local expires_at = count_from_now(job)
  if job.shown then
    local holder = job.assigned_worker_id
    write('HSET', of('lease', job.id), 'worker_id', holder, 'lease_id', job.lease_id, 'expires_at', expires_at)
  end
end

function leases.extend(job, ttl_s)
  if job.ttl_s ~= ttl_s then
    jobs.set(job, { ttl_s = ttl_s })
  end
  if job.is_extended then
    flush_ranks()
  end
  job.is_extended = true
  local expires_at = count_from_now(job)
  if job.shown then
    write('HSET', of('lease', job.id), 'expires_at', expires_at)
  end
end

-- Whether its worker got or renewed it after this time.
function leases.heard_since(job, at)
  local expires_at = at + tonumber(job.ttl_s) + LEASE_MARGIN_S
  return leases.over_at(job.id) > expires_at + TAKEOVER_TIE_S + (job.keep and tonumber(job.reconnect_grace_s) or 0)
end

-- The fields of a record that has none.
function leases.ended(job, changes)
  if job.lease_id then
    drop(of('lease', job.id))
    changes.lease_id, changes.incarnation, changes.ttl_s = false, false, false
    changes.keep, changes.reconnect_grace_s, changes.expires_at = false, false, false
  end
end

-- Whether this is the current one. Reports come without the incarnation.
function leases.is(job, worker_id, incarnation, lease_id, attempt)
  return job.lease_id == lease_id
    and job.assigned_worker_id == worker_id
    and job.attempt == attempt
    and (incarnation == nil or job.incarnation == incarnation)
end
