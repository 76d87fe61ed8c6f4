// What a narrow page shows, the key, and the beginning.

function setView(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll('nav button')) {
    button.ariaPressed = String(button.dataset.view === view);
  }
}

for (const button of document.querySelectorAll('nav button')) {
  button.addEventListener('click', () => setView(button.dataset.view));
}
byId('unlock').addEventListener('submit', event => {
  event.preventDefault();
  sessionStorage.setItem('key', byId('key').value.trim());
  byId('key').value = '';
  connect().catch(failed);
  watch();
});
// Not by autofocus: browsers log that they pass it over where the page was faster.
text.focus();
connect().catch(failed);
watch();
