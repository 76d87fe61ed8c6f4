// The machine: asks the server once a second what it has counted, and shows the rates between two answers.

const PERIOD_MS = 1000;
// While the server does not answer it is asked less often.
const SLOWEST_MS = 10_000;
const ANSWER_LIMIT_MS = 5000;
// Of the plot; nothing else is kept of the past.
const MOST_POINTS = 120;
const panel = byId('machine');
let before = null, points = [], timer = null, pause = PERIOD_MS;

const sum = (of, value) => of.reduce((total, it) => total + value(it), 0);
const ratio = (part, whole) => whole > 0 ? part / whole : null;
const percent = share => share === null ? '–' : `${Math.round(share * 100)} %`;
const count = number => number.toLocaleString('en');

function duration(seconds) {
  if (seconds === null) return '–';
  if (seconds < 0.0995) return `${(seconds * 1000).toPrecision(2)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

function element(name, className, content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

// Parts of a whole, each a share of 0 to 1 with its class.
function bar(parts, words) {
  const made = element('div', 'bar');
  made.role = 'img';
  made.ariaLabel = words;
  made.title = words;
  for (const [share, className] of parts) {
    const part = element('i', className);
    part.style.setProperty('--part', Math.min(Math.max(share, 0), 1));
    made.append(part);
  }
  return made;
}

async function poll() {
  const asking = new AbortController(), limit = setTimeout(() => asking.abort(), ANSWER_LIMIT_MS);
  try {
    const response = await call('/machine', { signal: asking.signal, cache: 'no-store' });
    if (response.status === 401) {
      byId('unlock').hidden = false;
      return away('locked', 'The server asks for an API key');
    }
    if (!response.ok) throw await problem(response);
    const now = { at: performance.now(), ...parsed(await response.text()) };
    show(now, before);
    [before, pause] = [now, PERIOD_MS];
    panel.classList.remove('stale');
  } catch (error) {
    pause = Math.min(pause * 2, SLOWEST_MS);
    const why = error.name === 'AbortError' ? 'it took too long' : error.message;
    away('gone', `The server does not answer as it should: ${why}`);
  } finally {
    clearTimeout(limit);
  }
}

// What was shown last stays, and looks it.
function away(state, words) {
  before = null;
  panel.classList.add('stale');
  showState(state, words);
}

// Polls again and again while the page is seen.
async function watch() {
  clearTimeout(timer);
  timer = null;
  if (document.hidden) { before = null; return; }
  const polling = watch.polling = poll();
  await polling;
  // Whoever began anew meanwhile goes on.
  if (watch.polling === polling && !document.hidden) timer = setTimeout(watch, pause);
}

// Announced by screen readers, so only where it changes.
function showState(state, words) {
  const shown = byId('state');
  shown.dataset.state = state;
  if (shown.textContent !== words) shown.textContent = words;
}

function show(now, before) {
  const words = now.detail.charAt(0).toUpperCase() + now.detail.slice(1);
  const up = now.replicas.filter(replica => replica.state === 'ready').length;
  const many = now.replicas.length > 1 ? ` (${up} of ${now.replicas.length} replicas are up)` : '';
  showState(now.state, words + many);
  // A server that was started again counts from 0.
  const begun = before && before.replicas.length === now.replicas.length
    && sum(before.replicas, of => of.steps.count) <= sum(now.replicas, of => of.steps.count);
  showFigures(now, begun ? before : null);
  showLanes(now, begun ? before : null);
  showRequests(now.requests);
  showTimeline(now);
}

function showFigures(now, before) {
  const gained = value => before && sum(now.replicas, value) - sum(before.replicas, value);
  const per = (part, whole) => before && ratio(gained(part), gained(whole));
  const at = value => sum(now.replicas, value);
  const seconds = before && (now.at - before.at) / 1000;
  const rate = before && ratio(gained(of => of.generated_tokens), seconds);
  const drafted = at(of => of.drafted_tokens);
  const figures = [
    ['Tokens a second', rate === null ? '–' : count(Math.round(rate))],
    ['Between tokens', duration(per(of => of.inter_token.seconds, of => of.inter_token.count))],
    ['First token', duration(per(of => of.first_token.seconds, of => of.first_token.count))],
    ['Step', duration(per(of => of.steps.seconds, of => of.steps.count))],
    ['Requests', `${count(now.requests.served)} of ${count(now.requests.limit)}`],
    ['Sequences', count(at(of => of.running))],
    ['In the queue', count(at(of => of.waiting))],
    ['KV in use', percent(ratio(at(of => of.kv_pages_used), at(of => of.kv_pages)))],
    ['KV kept', percent(ratio(at(of => of.kv_pages_cached), at(of => of.kv_pages)))],
    ['Prompts cached', percent(ratio(at(of => of.cache_hits), at(of => of.cache_queries)))],
    ['Drafts accepted', drafted ? percent(ratio(at(of => of.accepted_tokens), drafted)) : '–'],
    ['Workers lost', count(at(of => of.losses))],
  ];
  const list = byId('figures');
  if (!list.childElementCount) {
    list.append(...figures.map(([name]) => {
      const pair = element('div');
      pair.append(element('dt', '', name), element('dd'));
      return pair;
    }));
  }
  figures.forEach(([, value], index) => list.children[index].lastElementChild.textContent = value);
  if (rate !== null) points = [...points, rate].slice(-MOST_POINTS);
  plot();
}

function plot() {
  const most = Math.max(...points, 1), from = MOST_POINTS - points.length;
  const line = points.map((rate, index) => `${from + index},${(31 - rate / most * 29).toFixed(2)}`).join(' ');
  byId('plot').firstElementChild.setAttribute('points', line);
  const words = `Tokens a second, the last two minutes; at most ${count(Math.round(most))}`;
  byId('plot').ariaLabel = words;
  byId('plot-words').textContent = words;
}

// One that is shut down computes to its end.
const computes = ({ state }) => state === 'ready' || state === 'draining';

function showLanes(now, before) {
  const lanes = now.replicas.flatMap((replica, number) => {
    const name = rank => now.replicas.length > 1 ? `${number} · ${rank}` : `${rank}`;
    const described = rank => now.replicas.length > 1 ? `Replica ${number}, rank ${rank}` : `Rank ${rank}`;
    if (!replica.ranks.length) return [lane([name('–'), `Replica ${number}`], [], replica.state, replica)];
    return replica.ranks.map((rank, index) => {
      const old = before?.replicas[number].ranks[index];
      const names = [name(index), described(index)];
      if (!computes(replica)) return lane(names, [], replica.state, replica);
      if (!old) return lane(names, [], '–', replica);
      const seconds = (now.at - before.at) / 1000;
      const steps = rank.step_seconds - old.step_seconds, reads = rank.read_bytes - old.read_bytes;
      const waits = rank.wait_seconds === null ? null : rank.wait_seconds - (old.wait_seconds ?? 0);
      return lane(names, [[ratio(steps - (waits ?? 0), seconds), 'computes'], [ratio(waits ?? 0, seconds), 'waits']],
        steps > 0 ? told(rank, reads, steps, waits) : 'idle', replica);
    });
  });
  byId('lanes').replaceChildren(...lanes);
  byId('lanes-title').textContent = now.replicas.length > 1 ? 'Sockets: replica · rank' : 'Sockets: rank';
  const lost = now.replicas.flatMap(({ losses }, number) => losses ? [`${losses} × in replica ${number}`] : []);
  byId('lanes-note').textContent = lost.length ? `Workers were lost ${lost.join(', ')}; their streams went on.` : '';
}

// What a rank did in its steps: its reads against the limit, and its waits.
function told(rank, reads, steps, waits) {
  const reading = reads / steps;
  const limit = rank.read_limit;
  const share = limit ? `${percent(reading / limit)} of limit` : `${(reading / 1e9).toFixed(1)} GB/s`;
  return waits === null ? share : `${share}, waits ${percent(ratio(waits, steps))}`;
}

function lane([name, described], parts, words, replica) {
  const made = element('li', computes(replica) ? 'lane' : 'lane lost');
  const label = element('span', '', name);
  label.title = described;
  const said = element('span', '', words);
  if (!computes(replica)) said.title = replica.detail;
  made.append(label, bar(parts.filter(([share]) => share !== null), `${described}: ${words}`), said);
  return made;
}

// Where a request is: the engine tells of the queue once it has its first token.
function phase({ reason, seconds }) {
  if (reason) return reason;
  if (seconds.computed !== null) return 'decoding';
  return seconds.submitted === null ? 'preparing' : 'before its first token';
}

// Rows are kept by their requests, so that the focus stays where it is.
function showRequests({ newest, own, served }) {
  const table = byId('requests'), rows = new Map([...table.children].map(row => [row.dataset.id, row]));
  const seen = new Set();
  const shown = newest.filter(({ id }) => !seen.has(id) && seen.add(id)).map(request => {
    const row = rows.get(request.id) ?? newRow(request.id);
    const [, state, tokens, age] = row.children;
    state.textContent = phase(request);
    state.title = state.textContent;
    tokens.textContent = count(request.completion_tokens);
    age.textContent = duration(request.seconds.total);
    return row;
  });
  if (shown.some((row, index) => table.children[index] !== row) || table.childElementCount !== shown.length) {
    const focused = document.activeElement;
    table.replaceChildren(...shown);
    if (table.contains(focused)) focused.focus();
  }
  const notes = [];
  if (!own) notes.push('None.');
  if (own > newest.length) notes.push(`The newest ${newest.length} of ${count(own)}.`);
  if (served > own) notes.push(`${count(served - own)} of other keys.`);
  byId('requests-note').textContent = notes.join(' ');
}

function newRow(id) {
  const row = element('tr');
  row.dataset.id = id;
  const name = element('button', 'link', id), end = element('button', '', 'Cancel');
  name.type = end.type = 'button';
  name.title = `Timeline of ${id}`;
  end.ariaLabel = `Cancel ${id}`;
  name.addEventListener('click', () => follow(id));
  end.addEventListener('click', () => cancel(id, end));
  const cells = ['td', 'td', 'td', 'td', 'td'].map(cell => element(cell));
  cells[0].append(name);
  cells[4].append(end);
  row.append(...cells);
  return row;
}

async function cancel(id, button) {
  button.disabled = true;
  try {
    const response = await call(`/requests/${encodeURIComponent(id)}`, { method: 'DELETE' });
    // One that has ended by itself is as good.
    if (!response.ok && response.status !== 404) throw await problem(response);
    watch();
  } catch (error) {
    button.disabled = false;
    byId('requests-note').textContent = `${id} was not cancelled: ${error.message}`;
  }
}

document.addEventListener('visibilitychange', watch);
