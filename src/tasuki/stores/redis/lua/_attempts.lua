-- The beginning and the end of an attempt.

local attempts = {}

-- The job is `to.worker_id`'s now: one attempt more, a fresh lease.
function attempts.grant(job, to, epoch)
  local was = job.state
  if not LEASED[was] then
    jobs.leave(job)
  end
  if job.outcome then
    local changes = {}
    outcomes.clear(job, changes)
    jobs.set(job, changes)
  end
  -- Field by field: this is done for every job, and a table of changes costs as much as all the rest.
  job.state = rules.after(was, 'grant')
  job.attempt = plus_one(job.attempt)
  job.assigned_worker_id, job.assigned_at = to.worker_id, now.text
  job.lease_id, job.incarnation, job.ttl_s = to.lease_id, to.incarnation, to.ttl_s
  job.started_at, job.said, job.progress, job.delayed = nil, nil, nil, nil
  job.keep, job.reconnect_grace_s, job.expires_at = nil, nil, nil
  if to.on_disconnect == 'keep' or to.has_grace or epoch then
    local keep = to.on_disconnect == 'keep' and '1'
    jobs.set(job, { keep = keep, reconnect_grace_s = to.reconnect_grace_s, leader_epoch = epoch or job.leader_epoch })
  end
  jobs.touch(job)
  jobs.recount(job.group, was, job.state)
  if WORDS[was] ~= WORDS[job.state] then
    jobs.show_status(job, '')
  end
  leases.show(job)
end

-- What the verdict on an attempt says. Without an outcome it is the store's own word on a lost worker.
function attempts.settle(job, verdict, ended, changes)
  changes.failures = verdict.failures > 0 and tostring(verdict.failures)
  changes.losses = verdict.losses > 0 and tostring(verdict.losses)
  jobs.tell(job, rules.kinds[verdict.event], job.assigned_worker_id, '', verdict.reason)
  jobs.show_retries(job, verdict.failures + verdict.losses)
  if TERMINAL[verdict.state] then
    if verdict.event ~= 'cancel' then
      changes.dead = '1'
      write('LPUSH', key.dlq, job.id)
    end
    ended = ended or outcomes.made(verdict.event == 'cancel' and 'CANCELED' or 'LOST', verdict.reason)
    return jobs.finish(job, verdict.event, changes, ended, verdict.reason)
  end
  changes.state = verdict.state
  changes.not_before = verdict.delay_s > 0 and text(now.wall + verdict.delay_s)
  changes.delayed = changes.not_before and '1'
  if ended then
    outcomes.write(job, ended, changes)
  end
  if verdict.event ~= 'orphan' then -- an orphan's worker may still finish
    leases.ended(job, changes)
  end
  jobs.change(job, changes, verdict.reason)
end

function attempts.loss(job)
  return rules.after_loss(job.state, job, jobs.facts(job), job.assigned_worker_id)
end

-- Its worker is back before anybody took the orphan.
function attempts.resume(job, ttl_s)
  jobs.tell(job, 'resumed', job.assigned_worker_id, '', RESUMED)
  jobs.change(job, { state = rules.after(job.state, 'resume'), started_at = job.started_at or now.text })
  leases.extend(job, ttl_s)
end
