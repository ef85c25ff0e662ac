// Run by node in a project's folder, where the package is installed. Without WASI features the component imports nothing
// but the contract.
import { writeFile } from 'node:fs/promises';
import { componentize } from '@bytecodealliance/componentize-js';

const [witPath, worldName, out] = process.argv.slice(1);
const { component } = await componentize({
  sourcePath: 'plugin.js',
  witPath,
  worldName,
  disableFeatures: ['stdio', 'random', 'clocks', 'http', 'fetch-event'],
});
await writeFile(out, component);
