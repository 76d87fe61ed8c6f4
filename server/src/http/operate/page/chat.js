// The chat: messages, one stream at a time, and the key that the server asks for.

// Under this many milliseconds between first and last token a rate says more of the network than of the server.
const SHORTEST_RATED_MS = 1000;
// A text without a chat template need not come to an end by itself.
const CONTINUATION_TOKENS = 256;
// Turns that the page goes on showing; the chat itself keeps all.
const MOST_SHOWN = 400;
const byId = id => document.getElementById(id);
const [log, text, send, stop] = ['log', 'text', 'send', 'stop'].map(byId);
let model = null, chat = newChat();

// A chat owns its messages and its stream, so what still arrives for one that was left reaches no other.
function newChat() { return { messages: [], stream: null }; }

// The key stays in this tab, and goes to this server alone.
function call(path, options = {}) {
  const key = sessionStorage.getItem('key');
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  return fetch(path, { ...options, headers });
}

// What the server says of an error, or its status where it says nothing that can be read.
async function problem(response) {
  const said = await response.json().catch(() => null);
  return new Error(said?.error?.message ?? `the server answered ${response.status} without a reason`);
}

// Asks for a key where the server does, again if it refuses the one that it got. What it said of another key, or of
// none, that was in use before counts no more.
async function connect() {
  const key = sessionStorage.getItem('key'), response = await call('/v1/models');
  if (sessionStorage.getItem('key') !== key) return;
  const refused = response.status === 401;
  byId('unlock').hidden = !refused;
  if (refused) {
    if (key) add('error', (await problem(response)).message);
    byId('model').textContent = 'asks for an API key';
    byId('key').focus();
    return;
  }
  if (!response.ok) throw await problem(response);
  model = (await response.json()).data[0];
  byId('model').textContent = model.id;
  byId('model').title = model.id;
  greet();
  text.focus();
}

const failed = () => byId('model').textContent = 'the server does not answer';

function add(kind, content) {
  const turn = document.createElement('div');
  turn.className = kind === 'note' ? kind : `turn ${kind}`;
  turn.textContent = content;
  log.append(turn);
  while (log.childElementCount > MOST_SHOWN) log.firstElementChild.remove();
  log.scrollTop = log.scrollHeight;
  return turn;
}

function greet() {
  if (!model || model.can_chat) return;
  text.placeholder = 'Begin a text, and the model goes on with it';
  add('note', 'This model has no chat template, so it does not chat: it goes on with the text that you send.');
}

function showButtons() {
  send.hidden = chat.stream !== null;
  stop.hidden = chat.stream === null;
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Error('the server sent an event that is no JSON');
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = '';;) {
    const { value, done } = await reader.read();
    if (done) throw new Error('the connection ended before the answer did');
    buffer += value;
    const parts = buffer.split('\n\n');
    buffer = parts.pop();
    for (const part of parts) {
      if (!part.startsWith('data: ')) continue;
      const data = part.slice(6);
      if (data === '[DONE]') return;
      const event = parsed(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// A model without a chat template goes on with a text, and each text stands for itself.
function post(messages, signal) {
  const [path, what] = model.can_chat
    ? ['/v1/chat/completions', { messages }]
    : ['/v1/completions', { prompt: messages.at(-1).content, max_tokens: CONTINUATION_TOKENS }];
  return call(path, {
    method: 'POST', signal, headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ model: model.id, ...what, stream: true, stream_options: { include_usage: true } }),
  });
}

async function ask(question) {
  const mine = chat, stream = new AbortController(), start = performance.now();
  const asked = add('user', question), turn = add('assistant', '');
  mine.messages.push({ role: 'user', content: question });
  mine.stream = stream;
  showButtons();
  let answer = '', thought = '', tokens = 0, first = 0, last = 0, id = null, drawing = 0;
  // What was thought is shown until the answer begins.
  const draw = () => {
    cancelAnimationFrame(drawing);
    drawing = 0;
    turn.textContent = answer || thought;
    log.scrollTop = log.scrollHeight;
  };
  try {
    const response = await post(mine.messages, stream.signal);
    id = response.headers.get('x-request-id');
    // It was taken away while the page was open.
    if (response.status === 401) byId('unlock').hidden = false;
    if (!response.ok) throw await problem(response);
    for await (const event of events(response)) {
      const { content, reasoning } = event.choices?.[0]?.delta ?? {};
      const piece = content ?? event.choices?.[0]?.text;
      if (piece || reasoning) {
        last = performance.now();
        first ||= last;
        answer += piece ?? '';
        thought += reasoning ?? '';
        // Once a frame at most: a long answer that comes fast would leave no time for anything else.
        drawing ||= requestAnimationFrame(draw);
      }
      tokens = event.usage?.completion_tokens ?? tokens;
    }
    draw();
    const waited = Math.round((first || performance.now()) - start), took = last - first;
    const rate = took < SHORTEST_RATED_MS ? '' : `, ${Math.round((tokens - 1) / took * 1000)} tokens/s`;
    if (chat === mine) tell(`${tokens} tokens, first after ${waited} ms${rate}`, id);
  } catch (error) {
    draw();
    if (chat === mine && !stream.signal.aborted) add('error', error.message);
  }
  mine.stream = null;
  if (answer) {
    mine.messages.push({ role: 'assistant', content: answer });
  } else {
    // Asked for nothing: the question goes back to where it was typed, unless another is there by now.
    mine.messages.pop();
    turn.remove();
    if (chat === mine && !text.value) { asked.remove(); text.value = question; }
  }
  showButtons();
}

// The line under an answer, with the way to its timeline.
function tell(words, id) {
  const note = add('note', words);
  if (!id) return;
  const show = document.createElement('button');
  show.type = 'button';
  show.className = 'link';
  show.textContent = 'timeline';
  show.addEventListener('click', () => follow(id));
  note.append(' ', show);
  log.scrollTop = log.scrollHeight;
}

byId('form').addEventListener('submit', event => {
  event.preventDefault();
  const question = text.value.trim();
  if (chat.stream || !question || !model) return;
  text.value = '';
  ask(question);
});
text.addEventListener('keydown', event => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId('form').requestSubmit();
});
stop.addEventListener('click', () => chat.stream?.abort());
byId('reset').addEventListener('click', () => {
  chat.stream?.abort();
  chat = newChat();
  log.replaceChildren();
  greet();
  showButtons();
  text.focus();
});
