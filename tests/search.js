// What the site's search finds, by the program that runs in a reader's browser: node search.js SITE QUERY...
// Prints, for each query, the addresses of the pages that it finds, best first, as JSON.
const fs = require("fs");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers/`;
const program = fs.readdirSync(workers).find((name) => /^search.*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"));
const kinds = { setup: 0, query: 2 };
let handler, answered;

globalThis.self = globalThis;
globalThis.addEventListener = (kind, listener) => { handler = listener; };
globalThis.postMessage = (message) => answered(message);
vm.runInThisContext(fs.readFileSync(workers + program, "utf8"));

function ask(type, data) {
  return new Promise((resolve) => { answered = resolve; handler({ data: { type, data } }); });
}

(async () => {
  await ask(kinds.setup, { config: index.config, docs: index.docs, options: {} });
  const found = {};
  for (const query of queries) {
    const { data } = await ask(kinds.query, query);
    found[query] = data.items.map((sections) => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
