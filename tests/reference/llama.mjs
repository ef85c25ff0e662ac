// The greedy tokens of llama.cpp: node llama.mjs NODE_MODULES, with {file, tokens, prompts} on standard input.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.argv[2]}/`);
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(require.resolve("node-llama-cpp")));
const { file, tokens, prompts } = JSON.parse(readFileSync(0, "utf8"));
const llama = await getLlama({ gpu: false, maxThreads: 1, build: "never", logLevel: LlamaLogLevel.error });
const model = await llama.loadModel({ modelPath: file });
const answers = [];
for (const prompt of prompts) {
  const context = await model.createContext({ contextSize: 512, flashAttention: false, threads: 1 });
  const answer = [];
  for await (const token of context.getSequence().evaluate(prompt, { temperature: 0 })) {
    if (model.isEogToken(token)) break;
    answer.push(token);
    if (answer.length === tokens) break;
  }
  await context.dispose();
  answers.push(answer);
}
console.log(JSON.stringify(answers));
process.exit(0);
