import os
from argparse import ArgumentParser

import torch

from models.trainer import CDTrainer
from utils import get_loaders

torch.set_default_tensor_type(torch.HalfTensor)


def train(args):
    dataloaders = get_loaders(args)
    model = CDTrainer(args=args, dataloaders=dataloaders)
    model.train_models()


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--gpu_ids", type=str, default="0")
    parser.add_argument("--project_name", default="CD_ChangeFormerV6_1024", type=str)
    parser.add_argument("--checkpoint_root", default="checkpoints", type=str)
    parser.add_argument("--num_workers", default=4, type=int)
    parser.add_argument("--data_root", default="./data/LEVIR-CD", type=str)
    parser.add_argument("--batch_size", default=2, type=int)
    parser.add_argument("--img_size", default=1024, type=int)
    parser.add_argument("--embed_dim", default=256, type=int)
    parser.add_argument("--n_class", default=2, type=int)
    parser.add_argument("--optimizer", default="adamw", type=str)
    parser.add_argument("--lr", default=1e-4, type=float)
    parser.add_argument("--max_epochs", default=400, type=int)
    args = parser.parse_args()
    args.checkpoint_dir = os.path.join(args.checkpoint_root, args.project_name)
    os.makedirs(args.checkpoint_dir, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu_ids
    args.device = torch.device("cuda:0")
    train(args)
