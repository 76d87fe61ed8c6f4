// Where the time of a request went: its phases as the server traces them, and the newest step of each rank.

const PHASES = [
  ['prepare', 'arrived', 'submitted', 'reading the request'],
  ['queue', 'submitted', 'admitted', 'waiting for a slot'],
  ['prefill', 'admitted', 'computed', 'up to the first token'],
  ['decode', 'computed', 'ended', ''],
];
let followed = null;

// Shows the timeline of a request now and with each poll, while the server knows it.
function follow(id) {
  followed = { id, request: null };
  setView('machine');
  byId('timeline-note').textContent = `Asking for the times of ${id}`;
  byId('timeline').hidden = true;
  watch().then(() => byId('timeline-note').scrollIntoView({ block: 'nearest' }));
}

function showTimeline(now) {
  if (!followed) return;
  const { newest, ended } = now.requests;
  const found = [...newest, ...ended].find(({ id }) => id === followed.id);
  followed.request = found ?? followed.request;
  const request = followed.request;
  if (!request) {
    byId('timeline-note').textContent = `The server keeps the last requests that ended, and no longer ${followed.id}.`;
    return;
  }
  const state = request.reason ? `ended (${request.reason})` : phase(request);
  const tokens = `${count(request.prompt_tokens)} tokens of prompt, ${count(request.completion_tokens)} of answer`;
  byId('timeline-note').textContent = `${request.id}: ${state}, ${tokens}`;
  byId('timeline').hidden = false;
  byId('timeline').replaceChildren(...phases(request), ...steps(now));
}

// A bar to scale, and its legend. A phase that has begun and not ended lasts until now.
function phases(request) {
  const { total, ...reached } = request.seconds;
  const at = { arrived: 0, ...reached };
  const lasting = PHASES.map(([name, from, to, words]) => {
    const [begin, end] = [at[from], at[to] ?? (request.reason ? null : total)];
    const seconds = Math.max(end - begin, 0);
    return begin === null || end === null ? null : { name, words, seconds, open: at[to] === null };
  });
  // Behind the first that is under way nothing has begun.
  const first = lasting.findIndex(of => of?.open);
  const known = lasting.slice(0, first < 0 ? lasting.length : first + 1).filter(of => of);
  const whole = sum(known, of => of.seconds);
  const list = element('dl');
  for (const { name, words, seconds } of known) {
    const more = name === 'decode' && request.completion_tokens > 1
      ? `${duration(seconds / (request.completion_tokens - 1))} a token` : words;
    list.append(element('dt', `key ${name}`, name), element('dd', '', duration(seconds)), element('dd', '', more));
  }
  const parts = known.map(({ name, seconds }) => [ratio(seconds, whole) ?? 0, name]);
  const said = known.map(({ name, seconds }) => `${name} ${duration(seconds)}`).join(', ');
  const drawn = bar(parts, said);
  drawn.classList.add('phases');
  return [drawn, list];
}

// A token of each sequence is a step of all ranks of its replica: the newest, to the scale of the longest.
function steps(now) {
  const ranks = now.replicas.flatMap((of, number) => of.ranks.map((rank, index) => ({ number, index, rank })));
  const longest = Math.max(0, ...ranks.map(({ rank }) => rank.newest_step.seconds));
  if (!longest) return [];
  const list = element('ul', 'ranks');
  for (const { number, index, rank } of ranks) {
    const { seconds, wait_seconds, read_bytes } = rank.newest_step, waits = wait_seconds ?? 0;
    const name = now.replicas.length > 1 ? `${number} · ${index}` : `${index}`;
    const words = duration(seconds) + (wait_seconds === null ? '' : `, waits ${duration(waits)}`);
    const least = rank.read_limit ? `; its bytes take ${duration(read_bytes / rank.read_limit)} at the read limit` : '';
    const made = element('li', 'lane');
    const parts = [[(seconds - waits) / longest, 'computes'], [waits / longest, 'waits']];
    const drawn = bar(parts, `Newest step of rank ${name}: ${words}${least}`);
    made.append(element('span', '', name), drawn, element('span', '', words));
    list.append(made);
  }
  return [element('p', 'note', 'The newest step, by rank: a token of each sequence'), list];
}
