-- One turn: all its verbs in order, in one call, so that no other client sees half of it. Arguments:
--   mode, session, number, lease clock or '', wall clock or '', digest, count of verbs, then for each its name, how many
--     arguments, these
-- Modes:
--   run     do it. Answers {'done', answers, sentences for the log, subject and kind of queues that jobs came back to, positions of
--           lease requests that were cut short}
--   lead    as run, for turns with a leader's verbs, which may be refused after others were done
--   look    as run, for verbs that only read: leaves no trace of the turn
--   try     do it and roll it back, to know the answers: {'done', answers, digest, lease clock, wall clock}
--   commit  as run, if the answers still have the digest, else {'changed'} and nothing is written
--   recall  a turn whose answer was lost: {'done', answers} if it was done; else {'void'}, and it never will be done
-- A turn is done once: its number must be above the last one of its session ({app}:turn:{session}), else {'void'}. A leader's
-- verb of a stale epoch: {'stale', epoch, holder}, and nothing is written.

local mode, session, number, lease_clock, wall_clock, digest = take(6)
local count = take_number()
local mark = of('turn', session)

local function read_clocks()
  local time = redis.call('TIME')
  local seconds = tonumber(time[1]) + tonumber(time[2]) / 1e6
  now.lease = tonumber(given(lease_clock) or seconds)
  now.wall = tonumber(given(wall_clock) or seconds)
  now.text = text(now.wall)
  now.packed = cmsgpack.pack(now.text)
end

-- Returns the answers that are kept with the turn, and the complete ones.
local function execute(kept)
  local to_keep, to_show = {}, {}
  for i = 1, count do
    local name, width = take(2)
    local after = at + tonumber(width)
    if kept and verbs[name] then
      to_keep[i] = kept[i]
    else
      to_keep[i] = (verbs[name] or reads[name])()
      jobs.flush()
      queues.sweep()
    end
    at = after
    to_show[i] = complete[name] and complete[name](to_keep[i]) or to_keep[i]
    if reads[name] then
      to_keep[i] = ''
    end
  end
  jobs.flush_counts()
  return to_keep, to_show
end

local function remember_turn(answers)
  redis.call('HSET', mark, 'number', number, 'answers', answers)
  redis.call('EXPIRE', mark, MARK_TTL_S)
end

local function recall()
  local row = redis.call('HMGET', mark, 'number', 'answers')
  if row[1] == number and row[2] ~= '' then
    local _, answers = execute(cmsgpack.unpack(row[2]))
    return { 'done', answers }
  end
  remember_turn('')
  return { 'void' }
end

local function turn()
  local done = mode ~= 'look' and mode ~= 'try' and redis.call('HGET', mark, 'number')
  if done and tonumber(done) >= tonumber(number) then
    return { 'void' }
  end
  if mode == 'try' or mode == 'commit' or mode == 'lead' then
    undo = {}
  end
  local went, to_keep, to_show = pcall(execute)
  if not went then
    if to_keep ~= STALE then
      error(to_keep)
    end
    local row = reads.epoch()
    if undo then
      roll_back()
    end
    return { 'stale', row[1], row[2] }
  end
  if not undo then
    if mode == 'run' then
      remember_turn(cmsgpack.pack(to_keep))
    end
    return { 'done', to_show, notices, queues.all_came_back_to(), cut }
  end
  local found = redis.sha1hex(cmsgpack.pack(to_show))
  if mode == 'try' then
    roll_back()
    return { 'done', to_show, found, text(now.lease), text(now.wall) }
  end
  if mode == 'commit' and found ~= digest then
    roll_back()
    return { 'changed' }
  end
  remember_turn(cmsgpack.pack(to_keep))
  return { 'done', to_show, notices, queues.all_came_back_to(), cut }
end

read_clocks()
move_misplaced_keys()
if mode == 'recall' then
  return recall()
end
return turn()
