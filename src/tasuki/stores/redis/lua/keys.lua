-- Every key of the store, below the prefix of its app. The first block is a contract with outsiders, programs that use these keys
-- without tasuki: the keys, their types and the meaning of their fields. The second block is the store's own and may change with
-- it. Status, lease, retry_count and a TTL exist only for jobs of the app's own subject: for all jobs they would cost a third.
--
--   {app}:queue                 LIST    ready jobs of the app's own subject and default priority: LPUSH in, the oldest is last.
--                                       An outsider's SET {app}:payload:{id} + LPUSH {app}:queue {id} is a job
--   {app}:payload:{id}          STRING  payload; expires with the result. Of other subjects only a large one: see {app}:spec:{id}
--   {app}:status:{id}           HASH    status (queued, running, finished, failed, canceled), detail, updated_at; expires likewise
--   {app}:lease:{id}            HASH    worker_id, lease_id, expires_at. No TTL
--   {app}:lease:index           ZSET    leased jobs by the time at which their lease may be taken from its worker
--   {app}:retry_count:{id}      STRING  failures + losses; the limits apply to the two fields of {app}:job:{id}
--   {app}:delay                 ZSET    jobs that wait for promote, by the time at which they may run
--   {app}:dlq                   LIST    dead-lettered jobs, the newest first
--   {app}:result:{id}           STRING  the bytes of the result, or JSON that names the blob that has them: {"tasuki_blob":
--                                       {"sha256", "size_bytes"}}; its TTL starts when the job ends
--   {app}:summary:{id}, {app}:freqs:{id}  STRING  the parts of the result that have a key of their own
--   {app}:token:{sha256}        HASH    one token
--   {app}:revoked_tokens        SET     sha256 of revoked tokens
--   {app}:misplaced:{name}      any     one of the keys above that had another type; see turn.lua
--
--   {app}:job:{id}              STRING  everything else that changes about a job (see jobs.lua); without it there is no job
--   {app}:spec:{id}             STRING  everything that never changes about a job (see jobs.lua)
--   {app}:outcome:{id}          STRING  msgpack of the Outcome without the parts that have a key of their own
--   {app}:incidents:{id}        LIST    msgpack of [at, kind, attempt, worker_id, actor, reason], the oldest first
--   {app}:queue:{priority}:{group}:{kind}:{subject}  ZSET  all other ready jobs, by seq; commands of each exec apart: NUL and its
--                                       name stand behind the subject
--   {app}:queues:{priority}     ZSET    group, subject and kind of the queues above that hold a job, NUL between; all by 0. The
--                                       kind of a command has its exec behind it: 0:render
--   {app}:walks                 HASH    where a walk over {app}:queues:{priority} goes on that was cut short; queue: how many
--                                       entries at the old end of {app}:queue were looked at for jobs without a record
--   {app}:served                ZSET    groups by their turn in which they were last given a job
--   {app}:jobs                  ZSET    all jobs by seq, which is their order of submission
--   {app}:ended                 ZSET    terminal jobs by finished_at
--   {app}:late                  ZSET    waiting jobs that have a not_after, by it
--   {app}:counts                HASH    {counter}:{group} -> jobs
--   {app}:sequence              HASH    counters of ids: job, served, token, blob
--   {app}:epoch                 HASH    epoch, holder, taken_over_at
--   {app}:tokens                ZSET    sha256 of all tokens by order of creation
--   {app}:token_ids             HASH    token_id -> sha256
--   {app}:audit                 LIST    msgpack of [at, actor, action, target, detail], the newest first
--   {app}:blob:{sha256}         HASH    the live generation, and condemned:{generation} for those before it
--   {app}:blobs                 ZSET    live blobs that nothing refers to, by touched_at
--   {app}:condemned             ZSET    condemned blobs by touched_at
--   {app}:blob_bytes            STRING  size of all live blobs
--   {app}:owners:{sha256}       SET     jobs that refer to the blob, and cache:{cache_id} for caches
--   {app}:cache:{cache_id}      HASH    name -> msgpack of [sha256, size_bytes, target, owner, added_at]
--   {app}:cache_paths:{cache_id} HASH   path without case -> f and the name of the file there; of a folder d and the name of a file below
--   {app}:caches                HASH    cache_id -> msgpack of [target, owner, created_at]
--   {app}:rollups               ZSET    msgpack of what one server counted in one minute, by that minute
--   {app}:paused                HASH    pattern -> msgpack of [since, actor, reason], of subjects whose jobs are granted to nobody
--   {app}:turn:{session}        HASH    number and answers of the last turn of one store object; gone a day after its last turn

local prefix = APP .. ':'

local key = {
  queue = prefix .. 'queue',
  index = prefix .. 'lease:index',
  delay = prefix .. 'delay',
  dlq = prefix .. 'dlq',
  revoked = prefix .. 'revoked_tokens',
  served = prefix .. 'served',
  walks = prefix .. 'walks',
  jobs = prefix .. 'jobs',
  ended = prefix .. 'ended',
  late = prefix .. 'late',
  counts = prefix .. 'counts',
  sequence = prefix .. 'sequence',
  epoch = prefix .. 'epoch',
  tokens = prefix .. 'tokens',
  token_ids = prefix .. 'token_ids',
  audit = prefix .. 'audit',
  blobs = prefix .. 'blobs',
  condemned = prefix .. 'condemned',
  blob_bytes = prefix .. 'blob_bytes',
  caches = prefix .. 'caches',
  rollups = prefix .. 'rollups',
  paused = prefix .. 'paused',
}

local heads = {}

-- Returns a key of a kind that there are many of: of('payload', id).
local function of(kind, name)
  local head = heads[kind]
  if not head then
    head = prefix .. kind .. ':'
    heads[kind] = head
  end
  return head .. name
end
