// Saves every n optimiser steps. The same decisions as the Rust plugin `every-n-steps`.

const SCHEMA = {
  type: 'object',
  additionalProperties: false,
  required: ['n'],
  properties: {
    n: { type: 'integer', minimum: 1, maximum: Number.MAX_SAFE_INTEGER, description: 'Optimiser steps between two saves' },
  },
};

// A BigInt, as every 64-bit number of the contract is.
let n = 1n;

export const plugin = {
  describe() {
    return {
      name: 'every-n-steps-javascript',
      version: '0.1.0',
      description: 'Saves every n optimiser steps',
      configSchema: JSON.stringify(SCHEMA),
    };
  },

  configure(json) {
    const settings = JSON.parse(json);
    if (Object.keys(settings).join() !== 'n') throw 'there is one setting, and it must be given: n';
    if (!Number.isSafeInteger(settings.n) || settings.n < 1) throw 'n must be an integer of at least 1';
    n = BigInt(settings.n);
  },
};

export const scheduling = {
  afterStep(info) {
    const save = info.step % n === 0n;
    return { save, stop: false, reason: save ? `step ${info.step} is a multiple of ${n}` : '' };
  },
};
