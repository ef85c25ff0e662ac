//! MurmurHash3, x64, 128 bits (Appleby, public domain): quick and even. It is no defence against a corpus that was made to
//! collide.

const C1: u64 = 0x87c3_7b91_1142_53d5;
const C2: u64 = 0x4cf5_ad43_2745_937f;

/// The hash of `bytes`; its low half is the algorithm's first word.
pub fn hash128(bytes: &[u8], seed: u32) -> u128 {
    let (mut h1, mut h2) = (u64::from(seed), u64::from(seed));
    let mut blocks = bytes.chunks_exact(16);
    for block in &mut blocks {
        let (k1, k2) = words(block);
        h1 = (h1 ^ mix1(k1)).rotate_left(27).wrapping_add(h2).wrapping_mul(5).wrapping_add(0x52dc_e729);
        h2 = (h2 ^ mix2(k2)).rotate_left(31).wrapping_add(h1).wrapping_mul(5).wrapping_add(0x3849_5ab5);
    }
    let mut tail = [0; 16];
    tail[..blocks.remainder().len()].copy_from_slice(blocks.remainder());
    let (k1, k2) = words(&tail);
    h1 ^= mix1(k1) ^ bytes.len() as u64;
    h2 ^= mix2(k2) ^ bytes.len() as u64;
    h1 = h1.wrapping_add(h2);
    h2 = h2.wrapping_add(h1);
    h1 = finish(h1);
    h2 = finish(h2);
    h1 = h1.wrapping_add(h2);
    h2 = h2.wrapping_add(h1);
    u128::from(h2) << 64 | u128::from(h1)
}

fn words(block: &[u8]) -> (u64, u64) {
    let both = block.iter().rev().fold(0u128, |both, &byte| both << 8 | u128::from(byte));
    (both as u64, (both >> 64) as u64)
}

fn mix1(k1: u64) -> u64 {
    k1.wrapping_mul(C1).rotate_left(31).wrapping_mul(C2)
}

fn mix2(k2: u64) -> u64 {
    k2.wrapping_mul(C2).rotate_left(33).wrapping_mul(C1)
}

fn finish(mut h: u64) -> u64 {
    h = (h ^ h >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ h >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ h >> 33
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        // The check value of the author's own test (SMHasher's VerificationTest).
        let mut hashes = Vec::new();
        for length in 0..256u32 {
            let key: Vec<u8> = (0..length as u8).collect();
            hashes.extend(hash128(&key, 256 - length).to_le_bytes());
        }
        assert_eq!(hash128(&hashes, 0) as u32, 0x6384_BA69);
    }
}
